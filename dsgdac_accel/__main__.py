"""`python -m dsgdac_accel` is the `dsgdac` command."""

from dsgdac_accel.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
