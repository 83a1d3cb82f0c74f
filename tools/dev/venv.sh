#!/bin/sh
# Make .venv and install the pinned packages and this project into it: tools/dev/venv.sh PYTHON
# Checkov, which tests/deploy runs, has an environment of its own in .venv/checkov.
set -eu
python=$1

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Seqgate needs Python 3.11 or newer; $python is $("$python" -V)." >&2
    echo "Name another one: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
}

# Debian keeps venv in a package of its own.
"$python" -c 'import ensurepip, venv' 2>/dev/null || {
    package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    echo "$python cannot make virtual environments: installing $package with apt-get." >&2
    { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq "$package"; } || {
        echo "That did not work. As root: apt-get install $package, then try again." >&2
        exit 1
    }
}

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
# Nothing is installed but files whose hashes are in the lock. What is built from source is built with
# the pinned setuptools, not with today's.
sed -n '/^setuptools==/,/[^\]$/p' requirements.lock >.venv/setuptools.lock
pip --require-hashes -r .venv/setuptools.lock
pip --require-hashes --no-build-isolation -r requirements.lock
pip --no-build-isolation --no-deps --editable .

[ -x .venv/checkov/bin/python ] || .venv/bin/python -m venv .venv/checkov
.venv/checkov/bin/python -m pip install --quiet --disable-pip-version-check \
    --require-hashes -r requirements-checkov.lock
