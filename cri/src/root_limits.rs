//! The kernel's limits of the user root, and of open files.
//!
//! The node and root in all pods without a user namespace are the same user for the kernel. So root in one container
//! could exhaust a limit of this user. Then no pod could start, the node could accept no connections, or no client
//! could follow logs. All processes of the machine share the limit of open files. If a container exhausts it, only
//! processes with CAP_SYS_ADMIN can open files. Then other pods fail. systemd raises this limit at the boot, other
//! init systems do not. Raising these limits is safe: they limit memory of the kernel, and the kernel charges this
//! memory to the container. The memory limit of the pod still applies.

use std::io;
use std::path::Path;

use tracing::debug;

/// The largest value that the kernel accepts for all of these limits, on all architectures.
const MOST: u64 = 2_147_483_647;
const SYSCTLS: &str = "/proc/sys";
const NAMESPACES: &str = "user";
/// Sysctl from which the kernel derives the default of each namespace limit: half of the value.
const THREADS: &str = "kernel/threads-max";
/// The kinds of namespaces: those that the runtime creates for pods, and those that root in a user namespace can
/// create.
const KINDS: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
/// Limits of a user: files in all epoll instances, inotify watches, inotify instances. The last one is a limit of the
/// machine: open files.
const LIMITS: [&str; 4] = [
    "fs/epoll/max_user_watches",
    "fs/inotify/max_user_watches",
    "fs/inotify/max_user_instances",
    "fs/file-max",
];

/// Raises the limits. A failure is logged: the settings may be read-only.
pub(crate) fn raise() {
    raise_below(Path::new(SYSCTLS));
}

fn raise_below(sysctls: &Path) {
    raise_namespaces(&sysctls.join(NAMESPACES), &sysctls.join(THREADS));
    LIMITS.iter().for_each(|name| raise_limit(&sysctls.join(name)));
}

/// Raises the limits of namespaces that have the kernel's default. Other values stay, because an administrator has set
/// them: a low limit of user namespaces makes some attacks on the kernel harder.
fn raise_namespaces(dir: &Path, threads: &Path) {
    let Some(default) = read(threads).map(|threads| threads / 2) else { return };
    for kind in KINDS {
        let path = dir.join(format!("max_{kind}_namespaces"));
        if read(&path) == Some(default) {
            log(&path, std::fs::write(&path, MOST.to_string()));
        }
    }
}

fn raise_limit(path: &Path) {
    if read(path).is_some_and(|now| now < MOST) {
        log(path, std::fs::write(path, MOST.to_string()));
    }
}

fn read(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn log(path: &Path, written: io::Result<()>) {
    if let Err(error) = written {
        debug!(path = %path.display(), %error, "cannot raise a limit of root");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_with_the_kernels_default_are_raised_and_those_of_an_administrator_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = |kind: &str| dir.path().join(format!("max_{kind}_namespaces"));
        let threads = dir.path().join("threads-max");
        std::fs::write(&threads, "192731\n").unwrap();
        for (kind, limit) in [("uts", "96365\n"), ("mnt", "96365\n"), ("user", "0\n"), ("net", "500\n")] {
            std::fs::write(path(kind), limit).unwrap();
        }
        raise_namespaces(dir.path(), &threads);
        let now = ["uts", "mnt", "user", "net"].map(|kind| std::fs::read_to_string(path(kind)).unwrap());
        assert_eq!(now, ["2147483647", "2147483647", "0\n", "500\n"]);
        assert!(!path("ipc").exists(), "a kind that the kernel does not have");
    }

    #[test]
    fn limits_of_epoll_and_inotify_are_raised() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["epoll/max_user_watches", "inotify/max_user_watches", "inotify/max_user_instances"]
            .map(|name| dir.path().join("fs").join(name));
        for path in &paths {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "128\n").unwrap();
        }
        raise_below(dir.path());
        assert_eq!(paths.map(|path| std::fs::read_to_string(path).unwrap()), ["2147483647"; 3]);
    }

    #[test]
    fn the_limit_of_open_files_is_raised() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fs/file-max");
        std::fs::create_dir(dir.path().join("fs")).unwrap();
        std::fs::write(&path, "202048\n").unwrap();
        raise_below(dir.path());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "2147483647");
    }

    #[test]
    fn the_limit_of_watches_is_raised_and_never_lowered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("max_user_watches");
        for (before, after) in
            [("5493121\n", "2147483647"), ("9223372036854775807\n", "9223372036854775807\n")]
        {
            std::fs::write(&path, before).unwrap();
            raise_limit(&path);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        }
        raise_limit(&dir.path().join("absent"));
        assert!(!dir.path().join("absent").exists());
    }
}
