//! The kernel's limits on the number of namespaces of a user.
//!
//! Root of all pods without a user namespace, and of the node, is one user. So root of one container could use up a limit,
//! in user namespaces that it makes, and no pod could start any more. The kernel charges the memory of namespaces to the
//! container that makes them: the memory limit of a pod is enough of a limit.

use std::path::Path;

use tracing::debug;

const DIR: &str = "/proc/sys/user";
/// Half of it is the kernel's default for all kinds of namespaces.
const THREADS: &str = "/proc/sys/kernel/threads-max";
/// The kinds of namespaces that pods have, and those that user namespaces bring.
const KINDS: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
/// The largest limit that the kernel accepts.
const MOST: u64 = 2_147_483_647;

/// Raises the limits that have the kernel's default. Those that an administrator has set stay. A failure is logged: the
/// settings may be read-only.
pub(crate) fn raise() {
    raise_in(Path::new(DIR), Path::new(THREADS));
}

fn raise_in(dir: &Path, threads: &Path) {
    let read = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let Some(default) = read(threads).map(|threads| threads / 2) else { return };
    for kind in KINDS {
        let path = dir.join(format!("max_{kind}_namespaces"));
        if read(&path) != Some(default) {
            continue;
        }
        if let Err(error) = std::fs::write(&path, MOST.to_string()) {
            debug!(path = %path.display(), %error, "cannot raise a limit on namespaces");
        }
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
        raise_in(dir.path(), &threads);
        let read = |kind| std::fs::read_to_string(path(kind)).unwrap();
        assert_eq!(["uts", "mnt", "user", "net"].map(read), ["2147483647", "2147483647", "0\n", "500\n"]);
        assert!(!path("ipc").exists(), "a kind that the kernel does not have");
    }
}
