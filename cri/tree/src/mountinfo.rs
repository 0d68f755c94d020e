//! Fields of a line of `/proc/PID/mountinfo` (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

/// The path in a field. The kernel writes a blank, tab, newline or backslash of a path as a backslash and three octal
/// digits.
#[must_use]
pub fn unescaped(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) = (*first, after) {
            bytes.push(((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0'));
            rest = after;
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

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
    fn escaped_bytes_of_a_path_are_decoded() {
        let decoded = unescaped(r"/a\040b\011\012/\134040\134\377");
        assert_eq!(decoded.into_os_string().into_vec(), b"/a b\t\n/\\040\\\xff");
        for plain in ["/a", r"/a\04", r"/a\400", r"\"] {
            assert_eq!(unescaped(plain), PathBuf::from(plain));
        }
    }

    #[test]
    fn options_that_are_no_controllers_are_left_out() {
        let of = |kind, options| cgroup_controllers(kind, options);
        assert_eq!(of("cgroup", "rw,xattr,cpu,cpuacct").as_deref(), Some("cpu,cpuacct"));
        assert_eq!(of("cgroup", "rw,name=systemd").as_deref(), Some("name=systemd"));
        assert_eq!(of("cgroup2", "rw,nsdelegate").as_deref(), Some(""));
        assert_eq!(of("tmpfs", "rw"), None);
    }
}
