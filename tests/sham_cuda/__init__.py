"""A CUDA device on a machine without a GPU, so that the library's code for CUDA and NCCL runs in every test."""
