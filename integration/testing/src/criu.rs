//! A replacement for CRIU, for tests on kernels that it does not support.

/// Shell script that replaces CRIU for a dump. Its images cannot be restored. Like CRIU, it thaws the container, and
/// freezes it at the end.
pub const CRIU_STAND_IN: &str = r#"#!/bin/sh
[ "$1" = dump ] || exit 1
while [ $# -gt 0 ]; do
    case $1 in --images-dir) images=$2 ;; --work-dir) work=$2 ;; --freeze-cgroup) group=$2 ;; esac
    shift
done
state() { if [ -e "$group/cgroup.freeze" ]; then echo "$1" >"$group/cgroup.freeze"; else echo "$2" >"$group/freezer.state"; fi; }
state 0 THAWED
echo images >"$images/inventory.img"
echo log >"$work/dump.log"
state 1 FROZEN
"#;
