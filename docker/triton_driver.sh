#!/bin/sh
# Compiles Triton's CUDA driver into /opt/espalier, for the CUDA variant. Triton compiles kernels without help, but wants
# a C compiler for this one file when it starts; in the image, a program named gcc hands out what is compiled here.
set -eu
nvidia=/opt/espalier/lib/python3.11/site-packages/triton/backends/nvidia
out=/opt/espalier/lib/triton-driver

apt-get update --quiet
apt-get install --quiet --yes --no-install-recommends gcc libc6-dev
headers=$(python3.11 -c 'import sysconfig; print(sysconfig.get_path("include"))')
test -e "$headers/Python.h" || apt-get install --quiet --yes --no-install-recommends libpython3.11-dev

mkdir -p "$out" stub
: | gcc -x c - -shared -Wl,-soname,libcuda.so.1 -o stub/libcuda.so.1 # the real one comes with the GPU
gcc "$nvidia/driver.c" -O3 -shared -fPIC -Wno-psabi -o "$out/driver.so" \
    -L stub -Wl,--no-as-needed -l:libcuda.so.1 -I "$nvidia/include" -I "$headers"
readelf --dynamic "$out/driver.so" | grep --quiet 'NEEDED.*libcuda.so.1'

cat >/opt/espalier/bin/gcc <<'PROGRAM'
#!/bin/sh
# No compiler: gives what was compiled when the image was built, if asked for that.
cmp --silent "$1" /opt/espalier/lib/python3.11/site-packages/triton/backends/nvidia/driver.c || {
    echo "gcc: this image has Triton's CUDA driver, and no compiler for $1" >&2
    exit 1
}
while [ "$1" != -o ]; do shift; done
exec cp /opt/espalier/lib/triton-driver/driver.so "$2"
PROGRAM
chmod 755 /opt/espalier/bin/gcc
