"""What spark-submit is given: job.py MODULE [ARGUMENT ...], a job by its module.

A script of its own, so that the module's folder is not where Python looks for others first.
"""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
