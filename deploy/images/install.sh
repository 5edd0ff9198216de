#!/bin/sh
# Runs in the build stage of both images: install.sh IMAGE EXTRAS [PIP WHEEL ARGUMENTS]
#
# Makes /opt/zerotrain, a virtual environment without pip, from this source and a package index, or, where PIP_ARGS says
# --no-index, from the wheels in deploy/images/wheels/IMAGE alone; then writes down what is in it (CycloneDX) as
# /opt/zerotrain/sbom.cdx.json. Versions and digests of all packages are those of deploy/images/requirements.
set -eu

image=$1
extras=$2
shift 2
here=$(dirname "$0")
wheels=$here/wheels/$image
requirements=$here/requirements
prefix=/opt/zerotrain
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1

# What `python -m deploy.images wheels` wrote down must be what is here, no more and no less: pip takes the newest wheel
# that it finds.
mkdir -p "$wheels"
listed() { # WHEEL
    [ -f "$wheels/SHA256SUMS" ] && sed 's/^[0-9a-f]* [ *]//' "$wheels/SHA256SUMS" | grep -qxF "$1"
}
for wheel in "$wheels"/*.whl; do
    if [ -e "$wheel" ] && ! listed "$(basename "$wheel")"; then
        echo "error: $wheel is not in SHA256SUMS beside it: remove it, or run \`python -m deploy.images wheels $image\`" >&2
        exit 1
    fi
done
if [ -f "$wheels/SHA256SUMS" ]; then
    (cd "$wheels" && sha256sum --quiet --check SHA256SUMS)
fi

# Distributions' Python has no pip; pip's own wheel runs as it is.
if python3 -m pip --version >/dev/null 2>&1; then
    pip="python3 -m pip"
else
    archive=$(ls "$wheels"/pip-*.whl 2>/dev/null) || {
        echo "error: this base has no pip; run \`python -m deploy.images wheels $image\`, or take a base with pip" >&2
        exit 1
    }
    pip="python3 $archive/pip"
fi
install() { # PREFIX ARGUMENT...
    into=$1
    shift
    # shellcheck disable=SC2086  # PIP_ARGS are words
    $pip --quiet --python "$into/bin/python" install --only-binary :all: --no-compile --find-links "$wheels" \
        ${PIP_ARGS:-} "$@"
}
exactly() { # PREFIX LIST: these files and no others, whatever the index says
    install "$1" --no-deps --require-hashes --requirement "$requirements/$2.txt"
}

# pip itself and what else runs in this stage alone.
tools=$(mktemp -d)
python3 -m venv --without-pip "$tools"
exactly "$tools" tools
pip="$tools/bin/python -m pip"

# The wheel that lies there may be an older source's.
case " ${PIP_ARGS:-} " in
*" --no-index "*)
    wheel=$(ls "$wheels"/zerotrain-*.whl 2>/dev/null) || {
        echo "error: --no-index, and no wheel of zerotrain: run \`python -m deploy.images wheels $image\` first" >&2
        exit 1
    }
    ;;
*)
    exactly "$tools" build
    made=$(mktemp -d)
    PATH="$tools/bin:$PATH" $pip --quiet wheel --no-build-isolation --no-deps --wheel-dir "$made" "$@" .
    wheel=$(ls "$made"/zerotrain-*.whl)
    ;;
esac

python3 -m venv --without-pip "$prefix"
exactly "$prefix" "$image"
case "${TORCH:-none}" in
cuda) exactly "$prefix" torch-cuda ;;
# Builds for CPUs alone come from another place than the index whose digests are known: the version is pinned.
cpu) install "$prefix" --no-deps "$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$requirements/torch-cuda.txt")" ;;
esac
# Whatever index was asked: a training image without CUDA would fail as late as in the first pod with a GPU.
python3 "$here/variants.py" "$prefix" "${TORCH:-none}"
# The lists hold all that it needs: where pip may take nothing from anywhere, it says what is missing.
$pip --quiet --python "$prefix/bin/python" install --no-index --no-compile "$wheel[$extras]"
if [ -n "${EXTRA:-}" ]; then
    # shellcheck disable=SC2086  # EXTRA are words
    install "$prefix" --constraint "$here/../constraints.txt" $EXTRA
fi

"$tools/bin/cyclonedx-py" environment --output-reproducible --of JSON \
    --output-file "$prefix/sbom.cdx.json" "$prefix/bin/python"

# The root folder is read-only in the pods, so that nothing could be compiled at the first import. Unchecked hashes keep
# the files the same in every build.
compile() { "$prefix/bin/python" -m compileall "$@" --invalidation-mode unchecked-hash; }
compile -q "$prefix"/lib/python3*/site-packages/zerotrain
# Packages may hold files in the syntax of a newer Python, which this one never imports (torch does).
compile -qq "$prefix" || true
chmod -R a+rX "$prefix"
