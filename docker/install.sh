#!/bin/sh
# Installs into /opt/espalier what the named packages need from elsewhere, less what no image needs. Used by the Dockerfile.
set -eu
site=/opt/espalier/lib/python3.11/site-packages

python3.11 requirements.py "$@" >requirements.txt
if grep -q '^torch$' requirements.txt; then
    torch=$(sed -n 's/^torch==//p' constraints.txt)
    case $VARIANT in
        cpu) torch="torch==$torch+cpu" ;;
        cuda) torch="torch===$torch" ;; # with ===, no index can answer with a CPU build
        *) echo "VARIANT is cpu or cuda, not $VARIANT" >&2 && exit 1 ;;
    esac
    echo "$torch" >>requirements.txt
fi
/opt/build/bin/pip --quiet --python /opt/espalier/bin/python install --only-binary :all: --no-compile \
    --constraint constraints.txt --requirement requirements.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}

if [ "${VARIANT:-}" = cuda ]; then ./triton_driver.sh; fi

# What serves to test, to type-check, to debug and to compile.
find "$site" -type d -name tests -prune -exec rm -r {} +
find "$site" -name '*.a' -delete -o -name '*.py[ix]' -delete -o -name '*.pxd' -delete
# not what auditwheel or its like has patched: strip breaks that
find "$site" \( -name '*.libs' -o -name numpy -o -name nvidia -o -name torch -o -name triton \) -prune \
    -o -name '*.so' -exec strip --strip-unneeded {} +
for tool in numpy/_core/include numpy/distutils numpy/f2py torch/include torch/share; do rm -rf "${site:?}/$tool"; done

# The root is read-only at run time, so Python's own cache is made now; not for what hardly any of is ever imported.
python3.11 -m compileall -q --invalidation-mode unchecked-hash -x '/(kubernetes/.*/models|huggingface_hub|torch/testing/_internal)/' "$site"
