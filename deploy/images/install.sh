#!/bin/sh
# Runs in the build stage of both images: install.sh IMAGE EXTRAS [PIP WHEEL ARGUMENTS]
#
# Makes /opt/zerotrain, a virtual environment without pip, from this source and a package index, or, where PIP_ARGS says
# --no-index, from the wheels in deploy/images/wheels/IMAGE alone; then writes down what is in it (CycloneDX) as
# /opt/zerotrain/sbom.cdx.json.
set -eu

image=$1
extras=$2
shift 2
here=$(dirname "$0")
wheels=$here/wheels/$image
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
install() { # PREFIX REQUIREMENT...
    into=$1
    shift
    # shellcheck disable=SC2086  # PIP_ARGS are words
    $pip --quiet --python "$into/bin/python" install --only-binary :all: --no-compile --find-links "$wheels" \
        ${PIP_ARGS:-} "$@"
}

# The wheel that lies there may be an older source's.
case " ${PIP_ARGS:-} " in
*" --no-index "*)
    wheel=$(ls "$wheels"/zerotrain-*.whl 2>/dev/null) || {
        echo "error: --no-index, and no wheel of zerotrain: run \`python -m deploy.images wheels $image\` first" >&2
        exit 1
    }
    ;;
*)
    made=$(mktemp -d)
    # shellcheck disable=SC2086
    $pip --quiet wheel ${PIP_ARGS:-} --no-deps --wheel-dir "$made" "$@" .
    wheel=$(ls "$made"/zerotrain-*.whl)
    ;;
esac

python3 -m venv --without-pip "$prefix"
# shellcheck disable=SC2086  # EXTRA are words
install "$prefix" "$wheel[$extras]" ${EXTRA:-}
# Whatever index was asked: a training image without CUDA would fail as late as in the first pod with a GPU.
python3 "$here/variants.py" "$prefix" "${TORCH:-none}"

python3 -m venv --without-pip /opt/sbom
install /opt/sbom cyclonedx-bom
/opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON \
    --output-file "$prefix/sbom.cdx.json" "$prefix/bin/python"

# The root folder is read-only in the pods, so that nothing could be compiled at the first import. Unchecked hashes keep
# the files the same in every build.
compile() { "$prefix/bin/python" -m compileall "$@" --invalidation-mode unchecked-hash; }
compile -q "$prefix"/lib/python3*/site-packages/zerotrain
# Packages may hold files in the syntax of a newer Python, which this one never imports (torch does).
compile -qq "$prefix" || true
chmod -R a+rX "$prefix"
