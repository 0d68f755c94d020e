//! Fields of a line of `/proc/PID/mountinfo` (proc_pid_mountinfo(5)).

/// The controllers of a mounted cgroup hierarchy, by the type of its file system and the options of the mount. On v1
/// the text has the controllers, separated by commas, or the name of the hierarchy. On v2 it is empty. `None` for
/// another file system.
#[must_use]
pub fn cgroup_controllers(kind: &str, options: &str) -> Option<String> {
    match kind {
        "cgroup2" => Some(String::new()),
        "cgroup" => {
            let names =
                options.split(',').filter(|o| !matches!(*o, "rw" | "ro" | "xattr" | "clone_children"));
            Some(names.collect::<Vec<_>>().join(","))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_are_no_controllers_are_left_out() {
        let of = |kind, options| cgroup_controllers(kind, options);
        assert_eq!(of("cgroup", "rw,xattr,cpu,cpuacct").as_deref(), Some("cpu,cpuacct"));
        assert_eq!(of("cgroup", "rw,name=systemd").as_deref(), Some("name=systemd"));
        assert_eq!(of("cgroup2", "rw,nsdelegate").as_deref(), Some(""));
        assert_eq!(of("tmpfs", "rw"), None);
    }
}
