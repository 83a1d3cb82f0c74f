#!/bin/sh
# Build the images: deploy/docker/build.sh [options] [-- options for the builder]
#
#   --target services|jobs|all   images to build; default: all
#   --tag TAG                    default: the version in pyproject.toml
#   --name NAME                  default: localhost/seqgate; the jobs' image is NAME-jobs
#   --base python|debian|auto    python: the one that the Dockerfile pins, or PYTHON_IMAGE.
#                                debian: a Debian made by debootstrap (as root), for machines that
#                                reach a Debian mirror but no registry.
#                                auto, the default: python if available, else debian
#   --cache DIR                  where the Debian is made; default: build/image
#
# Needs buildah, podman or docker: BUILDER, or else the first of them that is installed.
# Passes on PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and, except with docker, PIP_CERT and its file.
set -eu
cd "$(dirname "$0")/../.."

target=all base=auto cache=build/image name=localhost/seqgate
tag=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
while [ $# -gt 0 ]; do
    case $1 in
    --target) target=$2 && shift 2 ;;
    --tag) tag=$2 && shift 2 ;;
    --name) name=$2 && shift 2 ;;
    --base) base=$2 && shift 2 ;;
    --cache) cache=$2 && shift 2 ;;
    --) shift && break ;;
    *) echo "unknown option: $1" >&2 && exit 2 ;;
    esac
done
case $target in services | jobs | all) ;; *) echo "unknown target: $target" >&2 && exit 2 ;; esac

for each in ${BUILDER:-buildah podman docker}; do
    if command -v "$each" >/dev/null; then builder=$each && break; fi
done
[ "${builder:-}" ] || { echo "buildah, podman or docker is needed" >&2 && exit 1; }

# Two images of a Debian with Python: one to build in, one to run in.
debian_image() {
    built=localhost/seqgate-debian:build runs=localhost/seqgate-debian:run
    if ! "$builder" inspect --type image "$built" >/dev/null 2>&1 ||
        ! "$builder" inspect --type image "$runs" >/dev/null 2>&1; then
        mkdir -p "$cache"
        make_debian "$cache/debian"
        in_image "$built"
        purged="python3-venv python3.11-venv python3-pip-whl python3-setuptools-whl"
        # shellcheck disable=SC2086 # several words
        chroot "$cache/debian" dpkg --purge $purged >&2
        in_image "$runs"
        rm -rf "$cache/debian"
    fi
    PYTHON_IMAGE=$built
    RUNTIME_IMAGE=$runs
}

make_debian() {
    rm -rf "$1"
    mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
    # shellcheck disable=SC2086 # none, or one word
    debootstrap --variant=minbase --include=ca-certificates,python3-venv bookworm "$1" $mirror >&2
    security=$(sed -n 's/^URIs: *\(.*security.*\)/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null)
    if [ "$security" ]; then
        echo "deb $security bookworm-security main" >>"$1/etc/apt/sources.list"
    else
        echo "no mirror of Debian's security updates is configured here: none are installed" >&2
    fi
    # The builder's, which debootstrap copied, and which apt still needs.
    chroot "$1" sh -c 'apt-get update && apt-get upgrade --yes' >&2
    rm -f "$1/etc/resolv.conf" "$1/etc/hostname"
    find "$1/var/cache/apt/archives" -name '*.deb' -delete
    find "$1/var/lib/apt/lists" -type f -delete
}

# Make the Debian's folder an image of one layer.
in_image() {
    printf 'FROM scratch\nCOPY . /\n' >"$cache/Dockerfile"
    "$builder" build -t "$1" -f "$cache/Dockerfile" "$cache/debian" >&2
}

RUNTIME_IMAGE=${RUNTIME_IMAGE:-}
PYTHON_IMAGE=${PYTHON_IMAGE:-$(sed -n 's/^ARG PYTHON_IMAGE=//p' deploy/docker/Dockerfile)}
case $base in
python) ;;
debian) debian_image ;;
auto)
    if ! "$builder" inspect --type image "$PYTHON_IMAGE" >/dev/null 2>&1 &&
        ! "$builder" pull "$PYTHON_IMAGE" >/dev/null 2>&1; then
        echo "cannot pull $PYTHON_IMAGE: building from a Debian" >&2
        debian_image
    fi
    ;;
*) echo "unknown base: $base" >&2 && exit 2 ;;
esac

set -- --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" \
    --build-arg "RUNTIME_IMAGE=${RUNTIME_IMAGE:-$PYTHON_IMAGE}" "$@"
for each in PIP_INDEX_URL PIP_EXTRA_INDEX_URL; do
    eval "value=\${$each:-}"
    [ -z "$value" ] || set -- --build-arg "$each=$value" "$@"
done
if [ "${PIP_CERT:-}" ] && [ "$builder" != docker ]; then
    set -- --build-arg "PIP_CERT=$PIP_CERT" --volume "$PIP_CERT:$PIP_CERT:ro" "$@"
fi
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
set -- --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" --build-arg "VERSION=$tag" \
    --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" "$@"
[ "$builder" = docker ] || set -- --layers --timestamp "$SOURCE_DATE_EPOCH" "$@"

for each in services jobs; do
    if [ "$target" != all ] && [ "$target" != "$each" ]; then continue; fi
    image=$name:$tag
    [ "$each" = services ] || image=$name-jobs:$tag
    "$builder" build --target "$each" -t "$image" -f deploy/docker/Dockerfile "$@" . >&2
    echo "$image"
done
