//! Cgroups that root in a container creates and changes. Without a seccomp profile, root can create user and cgroup
//! namespaces, and mount its own cgroup of each hierarchy there. The tests change the same cgroups from the host.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_integration::{Crictl, Machine, eventually, on_a_machine, process_status};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use serde_json::json;

use super::device::start_victim;
use super::{Attacker, Pids, on_a_runtime, on_an_attacker, pod_config, write};

/// The process's cgroup in each hierarchy. Root cgroups are left out: a hierarchy that no program uses has only this one.
fn cgroups(pid: u64) -> BTreeSet<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    text.lines().filter(|line| !line.ends_with(":/")).map(str::to_owned).collect()
}

/// Process id of the parent.
pub(super) fn parent(pid: u64) -> u64 {
    process_status(pid, "PPid")
}

/// A file that freezes the cgroup, with its contents for a frozen and a thawed cgroup.
pub(super) fn freezer(group: &Path) -> (PathBuf, &'static str, &'static str) {
    match group.join("freezer.state") {
        v1 if v1.exists() => (v1, "FROZEN", "THAWED"),
        _ => (group.join("cgroup.freeze"), "1", "0"),
    }
}

/// The directory of a process's cgroup, in the hierarchy of a v1 controller if there is one.
pub(super) fn directory(pid: u64, controller: &str) -> PathBuf {
    let all = cgroups(pid);
    let v1 = all.iter().find_map(|line| line.split_once(&format!(":{controller}:")));
    let (mount, group) = match v1 {
        Some((_, group)) => (Path::new("/sys/fs/cgroup").join(controller), group),
        None => {
            (PathBuf::from("/sys/fs/cgroup"), all.iter().find_map(|line| line.strip_prefix("0::")).unwrap())
        }
    };
    mount.join(group.trim_start_matches('/'))
}

/// Removes the pod. Fails if anything of it cannot be removed.
fn remove_pod(attacker: &Attacker<'_>) {
    attacker.cri.crictl(&["stopp", &attacker.pod]);
    attacker.cri.crictl(&["rmp", &attacker.pod]);
}

/// In hierarchies without controllers, all containers were in one cgroup with all shims. One container could kill and
/// freeze them by `cgroup.kill` and `cgroup.freeze` of the v2 hierarchy beside v1.
#[test]
fn a_container_shares_no_cgroup_with_another_pod() {
    on_a_runtime(|machine, cri| {
        let attacker = Attacker::new(machine, cri, Pids::Container, |_| {});
        let victim = start_victim(&attacker);
        let own = cgroups(attacker.pid(&attacker.id));
        for other in [victim.pid(&victim.id), parent(victim.pid(&victim.id))] {
            let shared: Vec<String> = own.intersection(&cgroups(other)).cloned().collect();
            assert_eq!(shared, [""; 0]);
        }
        // The cgroups of the pods are removed with them.
        let ours = |line: &String| line.contains(&attacker.pod) || line.contains(&attacker.id);
        let (shim, pid) = (parent(attacker.pid(&attacker.id)), attacker.pid(&attacker.id));
        let groups: BTreeSet<String> =
            cgroups(shim).union(&cgroups(pid)).filter(|line| ours(line)).cloned().collect();
        assert!(!groups.is_empty());
        remove_pod(&attacker);
        for line in groups {
            let group = line.splitn(3, ':').nth(2).unwrap().trim_start_matches('/').to_owned();
            let mounts = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path());
            let left = mounts
                .chain(["/sys/fs/cgroup".into()])
                .map(|mount| mount.join(&group))
                .find(|at| at.exists());
            assert_eq!(left, None, "{line}");
        }
        cri.crictl(&["rmp", "-f", &victim.pod]);
    });
}

/// Mounts the hierarchies of the process's cgroups in namespaces of its own, looks for `release_agent`, and writes what
/// the file contains already. So the test changes nothing on the host, even if the test fails.
const RELEASE_AGENT: &str = "
mkdir /m
exec /usr/bin/unshare --user --map-root-user --mount --cgroup --propagation unchanged /bin/sh -c '
    echo IN-NAMESPACES
    for options in $(cut -d: -f2 /proc/self/cgroup) memory rdma none,name=own; do
        mkdir -p /m/$options
        mount -t cgroup -o $options cgroup /m/$options && echo MOUNTED $options
    done 2>&1
    for agent in $(find /m -name release_agent); do
        program=$(cat $agent)
        echo FOUND $agent
        echo \"$program\" >$agent && echo WRITTEN $agent
    done
    true
'";

/// CVE-2022-0492: root mounted a v1 hierarchy in its own user and cgroup namespaces, and wrote `release_agent`. The
/// kernel runs this program on the host when a cgroup becomes empty. Only root cgroups have the file, so a container
/// must be in none of them.
#[test]
fn cve_2022_0492_a_container_finds_no_release_agent() {
    on_a_runtime(|machine, cri| {
        // The busybox of the image cannot create cgroup namespaces, but `unshare` of the host can. The machine of
        // scripts/test-vm has `unshare` in /bin, and no shell in /usr.
        let is_usual = Path::new("/usr/bin/unshare").exists();
        let program = if is_usual { ("/usr", "/usr") } else { ("/bin/unshare", "/usr/bin/unshare") };
        let mounts: Vec<_> = [program, ("/lib", "/lib"), ("/lib64", "/lib64")]
            .into_iter()
            .filter(|(host, _)| Path::new(host).exists())
            .map(|(host, container)| {
                let source = fs::canonicalize(host).unwrap();
                json!({ "container_path": container, "host_path": source, "readonly": true })
            })
            .collect();
        let attacker =
            Attacker::new(machine, cri, Pids::Container, |config| config["mounts"] = mounts.into());
        let output = attacker.sh(RELEASE_AGENT);
        assert!(output.contains("IN-NAMESPACES"), "{output}");
        assert!(!output.contains("FOUND") && !output.contains("WRITTEN"), "{output}");
        let has_v1 = cgroups(attacker.pid(&attacker.id)).iter().any(|line| !line.starts_with("0::"));
        let apparmor = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
        // The default AppArmor profile denies all mounts.
        if has_v1 && !apparmor.is_ok_and(|enabled| enabled.starts_with('Y')) {
            assert!(output.contains("MOUNTED"), "{output}");
        }
    });
}

/// On v1 a killed process of a frozen cgroup did not end, and the pod could not be removed.
#[test]
fn a_container_that_has_frozen_itself_is_killed() {
    on_an_attacker(Pids::Container, |attacker| {
        let pid = attacker.pid(&attacker.id);
        let frozen = directory(pid, "freezer").join("frozen");
        fs::create_dir(&frozen).unwrap();
        fs::write(frozen.join("cgroup.procs"), pid.to_string()).unwrap();
        let (file, state, _) = freezer(&frozen);
        fs::write(file, state).unwrap();
        attacker.cri.crictl(&["stop", "-t", "1", &attacker.id]);
        attacker.cri.crictl(&["rm", &attacker.id]);
        assert!(!frozen.exists());
    });
}

/// A cgroup whose path was longer than the kernel accepts was never removed, and neither was the pod.
#[test]
fn cgroups_that_a_container_nests_deeply_are_removed() {
    on_an_attacker(Pids::Container, |attacker| {
        let pid = attacker.pid(&attacker.id);
        let group = directory(pid, "pids");
        let (name, mode) = ("d".repeat(200), Mode::from_bits_truncate(0o755));
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut at = OwnedFd::from(File::open(&group).unwrap());
        for _ in 0..40 {
            mkdirat(&at, name.as_str(), mode).unwrap();
            at = openat(&at, name.as_str(), flags, Mode::empty()).unwrap();
        }
        drop(at);
        remove_pod(attacker);
        assert!(!group.exists());
    });
}

/// A local user can mount a file system of its own (FUSE) at a path that is not UTF-8. Then the node did not start, and
/// pods failed.
#[test]
fn pods_start_beside_a_mount_whose_name_is_not_utf_8() {
    on_a_machine(|machine| {
        let place = machine.path("").join(std::ffi::OsStr::from_bytes(b"\xff"));
        fs::create_dir(&place).unwrap();
        let socket = format!("unix://{}", machine.path("run/cri.sock").display());
        let script = r#"mount -t tmpfs user "$1" && shift && exec "$@""#;
        // The mount ends with the mount namespace of the runtime.
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(&place).arg(Machine::coracle());
        command
            .args(["runtime", "--listen", &socket, "--cni-conf-dir", "", "--root"])
            .arg(machine.path("state"));
        command
            .arg("--state")
            .arg(machine.path("run"))
            .args(["--cgroup-root", &format!("/{}", machine.name())]);
        let mut runtime = command.stdin(Stdio::null()).spawn().unwrap();
        let crictl = Crictl::new(&socket);
        eventually("the runtime", 20, || {
            assert!(runtime.try_wait().unwrap().is_none(), "the runtime has ended");
            crictl.try_crictl(&["version"]).status.success()
        });
        let pod = crictl.crictl(&["runp", &write(machine, "pod", &pod_config(machine, Pids::Container))]);
        crictl.crictl(&["rmp", "-f", &pod]);
        runtime.kill().unwrap();
        runtime.wait().unwrap();
    });
}
