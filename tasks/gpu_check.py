"""Check the GPU path in under eight minutes: part 1 on one GPU, part 2 on two or more.

python tasks/gpu_check.py
python tasks/gpu_check.py --part 1 --json gpu.json

It starts its own processes, so start it with python alone. Without a GPU it runs what a CPU can tell, with gloo in
place of NCCL, and says what it skipped. Each line is a check: PASS refutes a suspicion, FAIL confirms it. The exit
status is 0 only without a FAIL.
"""

from __future__ import annotations

from tasks.gpu.command import main

if __name__ == "__main__":
    main()
