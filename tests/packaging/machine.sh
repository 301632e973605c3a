# Boots systemd in a machine of its own: a root of which every change is in memory, and its own processes, mounts,
# network and control groups. Usage, as root: unshare ... sh machine.sh FOLDER PYTHON SITE_PACKAGES SOURCE
set -eu
folder=$1 python=$2 packages=$3 source=$4

# Nothing below reaches the machine outside: not mounts, and after pivot_root, no file of it can be written.
mount --make-rprivate /
mount -t tmpfs -o size=1g tmpfs "$folder"
mkdir "$folder/changes" "$folder/work" "$folder/root"
mount -t overlay -o "lowerdir=/,upperdir=$folder/changes,workdir=$folder/work" overlay "$folder/root"
cd "$folder/root"
for place in tmp var/tmp var/log var/lib/systemd run etc/systemd/system dev; do
    mkdir -p "$place"
    mount -t tmpfs -o mode=755 tmpfs "$place"
done
chmod 1777 tmp var/tmp
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mkdir sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
for controller in unified $(sed '1d; s/\t.*//' /proc/cgroups); do # folders that systemd takes for them: it limits nothing
    mkdir -p "sys/fs/cgroup/$controller"
    mount -t tmpfs tmpfs "sys/fs/cgroup/$controller"
done
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
ln -s /proc/self/fd dev/fd
mknod -m 666 dev/tty c 5 0
mkdir dev/shm dev/pts dev/mqueue dev/hugepages
ln -s pts/ptmx dev/ptmx
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts

# flowctl as in packaging/systemd: /opt/flowctl/bin/flowctl, with the Python and the packages of the tests.
rm -rf opt/flowctl
mkdir -p opt/flowctl/bin opt/flowctl/python opt/flowctl/packages opt/flowctl/source
for name in python packages source; do
    eval "mount --bind \"\$$name\" opt/flowctl/$name"
    mount -o remount,bind,ro "opt/flowctl/$name"
done
cat >opt/flowctl/bin/flowctl <<'EOF'
#!/bin/sh
export LD_LIBRARY_PATH=/opt/flowctl/python/lib
export PYTHONPATH=/opt/flowctl/source:/opt/flowctl/source/servers:/opt/flowctl/packages PYTHONDONTWRITEBYTECODE=1
exec /opt/flowctl/python/bin/python3 -m flowctl "$@"
EOF
chmod 755 opt/flowctl opt/flowctl/bin opt/flowctl/bin/flowctl

# What an empty machine has no use for; a unit that is started pulls all of it in.
for unit in usr/lib/systemd/system/*.target.wants/*; do
    case $unit in
    */systemd-journald.s* | */sysinit.target.wants/*.target) ;;
    *) ln -sf /dev/null "etc/systemd/system/${unit##*/}" ;;
    esac
done
printf '[Unit]\nRequires=basic.target systemd-journald.service\n' >etc/systemd/system/machine.target
printf '[Journal]\nStorage=volatile\nAudit=no\n' >etc/systemd/journald.conf
ip link set lo up

mkdir old
pivot_root . old
umount -l /old
mount --make-rshared / # among the units in here, as a machine that boots has it
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=machine.target --log-target=journal --show-status=0
