//! Local users of the machine, and files whose size or type is chosen by a container or an image.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_integration::{Cluster, Machine, eventually, on_a_machine};
use coracle_testing::{NO_IDMAPPED_TMPFS, has_idmapped_tmpfs, skip_part};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};

/// An unprivileged user.
const NOBODY: u32 = 65_534;

/// A secret, and a pod whose containers need files of the state and run directories. One container has an unprivileged
/// user.
const PODS: &str = r#"
apiVersion: v1
kind: Secret
metadata: {name: key}
stringData: {password: hush-hush}
---
apiVersion: v1
kind: Pod
metadata: {name: plain}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: busybox
    command: [sh, -c, "cp /bin/busybox /root/sh && chmod 6755 /root/sh && mkdir /made && touch /file && sleep 100000"]
    env: [{name: PASSWORD, valueFrom: {secretKeyRef: {name: key, key: password}}}]
    volumeMounts:
    - {name: shared, mountPath: /shared}
    - {name: shared, mountPath: /part, subPath: new/deep}
    - {name: key, mountPath: /key}
  - name: user
    image: busybox
    securityContext: {runAsUser: 1000, runAsGroup: 1000}
    command: [sh, -c, "touch /shared/of-user /part/of-user && cat /key/password && echo && sleep 100000"]
    volumeMounts:
    - {name: shared, mountPath: /shared}
    - {name: shared, mountPath: /part, subPath: new/deep}
    - {name: key, mountPath: /key}
  volumes: [{name: shared, emptyDir: {}}, {name: key, secret: {secretName: key}}]
"#;

/// A pod with a user namespace and an unprivileged user, which needs such files.
const MAPPED: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: mapped}
spec:
  terminationGracePeriodSeconds: 0
  hostUsers: false
  securityContext: {runAsUser: 1000, fsGroup: 2000}
  containers:
  - name: c
    image: busybox
    command: [sh, -c, "touch /shared/of-user && cat /key/password && echo && sleep 100000"]
    volumeMounts: [{name: shared, mountPath: /shared}, {name: key, mountPath: /key}]
  volumes: [{name: shared, emptyDir: {}}, {name: key, secret: {secretName: key}}]
"#;

/// Runs a test with a cluster in a directory that all users may enter, started with this umask.
fn with_mask(mask: u32, test: impl FnOnce(&Machine, &mut Cluster) + Send + 'static) {
    on_a_machine(move |machine| {
        fs::set_permissions(machine.path(""), Permissions::from_mode(0o755)).unwrap();
        let mirrors = machine.start_registry();
        unshare(CloneFlags::CLONE_FS).unwrap();
        umask(Mode::from_bits_truncate(mask));
        let mut cluster = Cluster::up(machine, &mirrors);
        test(machine, &mut cluster);
    });
}

fn start_pods(cluster: &Cluster) {
    cluster.apply(PODS);
    let mut pods = vec!["pod/plain"];
    if has_idmapped_tmpfs() {
        cluster.apply(MAPPED);
        pods.push("pod/mapped");
    } else {
        skip_part!(NO_IDMAPPED_TMPFS);
    }
    cluster.kubectl(&[&["wait", "--for=condition=Ready", "--timeout=120s"], pods.as_slice()].concat());
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).mode() & 0o7777
}

fn every_path(top: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(top).into_iter().flatten().flatten() {
        into.push(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            every_path(&entry.path(), into);
        }
    }
}

/// Paths that an unprivileged user can read, write or execute, if it knows their names.
fn reachable(tops: &[PathBuf]) -> Vec<String> {
    let mut paths = Vec::new();
    tops.iter().for_each(|top| every_path(top, &mut paths));
    assert!(paths.len() > 100, "the directories are empty");
    let script =
        r#"while IFS= read -r p; do if [ -r "$p" ] || [ -w "$p" ] || [ -x "$p" ]; then echo "$p"; fi; done"#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).uid(NOBODY).gid(NOBODY).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    let mut input = shell.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        for path in paths {
            writeln!(input, "{}", path.display()).unwrap();
        }
    });
    let output = shell.wait_with_output().unwrap();
    writer.join().unwrap();
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

fn assert_private(machine: &Machine) {
    let (state, run) = (machine.path("state"), machine.path("run"));
    // The empty layer with mount points is excluded. It is the same on every machine.
    let mut open = reachable(&[state.clone(), run.clone()]);
    open.retain(|path| !path.contains("/state/mount-points"));
    assert!(open.is_empty(), "a local user reaches {} paths: {:?}", open.len(), &open[..open.len().min(20)]);
    for top in [&state, &run] {
        assert_eq!(mode(top) & !0o711, 0, "{}", top.display());
    }
    let private = ["store", "pki", "containers", "images", "agent"].map(|name| state.join(name));
    for directory in private.iter().chain(&["containers", "sandboxes"].map(|name| run.join(name))) {
        assert_eq!(mode(directory), 0o700, "{}", directory.display());
    }
    for directory in [state.join("pods"), run.join("volumes")] {
        assert_eq!(mode(&directory), 0o750, "{}", directory.display());
    }
    for pod in fs::read_dir(state.join("pods")).unwrap().flatten() {
        assert_eq!(mode(&pod.path()), 0o750, "{}", pod.path().display());
    }
    for record in ["containers", "sandboxes"].map(|name| run.join(name)) {
        for one in fs::read_dir(record).unwrap().flatten() {
            assert_eq!(mode(&one.path().join("record.json")), 0o600, "{}", one.path().display());
        }
    }
    for file in ["state/admin.kubeconfig", "state/sealing.key", "run/cri.sock", "run/node.sock"] {
        // A node that has just started has no sockets yet.
        eventually(file, 20, || machine.path(file).exists());
        assert_eq!(mode(&machine.path(file)), 0o600, "{file}");
    }
}

/// Asserts the file modes that containers see. They do not depend on the umask.
fn assert_seen(cluster: &Cluster) {
    let modes = cluster.kubectl(&[
        "exec",
        "plain",
        "-c",
        "c",
        "--",
        "stat",
        "-c",
        "%a %n",
        "/",
        "/shared",
        "/part",
        "/made",
        "/file",
        "/key",
        "/etc/hosts",
        "/etc/resolv.conf",
        "/dev/termination-log",
        "/proc/1/root/etc",
    ]);
    let wanted = "755 /\n777 /shared\n777 /part\n755 /made\n644 /file\n755 /key\n644 /etc/hosts\n\
                  644 /etc/resolv.conf\n666 /dev/termination-log\n755 /proc/1/root/etc\n";
    assert_eq!(modes, wanted);
    assert_eq!(cluster.kubectl(&["logs", "plain", "-c", "user"]), "hush-hush\n");
    if has_idmapped_tmpfs() {
        assert_eq!(cluster.kubectl(&["logs", "mapped"]), "hush-hush\n");
    }
}

/// CVE-2021-41103: a local user ran a set-user-id program in a container's layer.
#[test]
fn a_local_user_reaches_nothing_of_state_and_run_directories_when_the_umask_is_0() {
    with_mask(0, |machine, cluster| {
        start_pods(cluster);
        assert_private(machine);
        assert_seen(cluster);
        let logs = machine.path("logs");
        assert_eq!(mode(&logs), 0o750);
        // The modes that an earlier version has set.
        cluster.stop();
        for path in [
            "state",
            "run",
            "state/store",
            "state/containers",
            "state/pods",
            "run/containers",
            "run/sandboxes",
        ] {
            fs::set_permissions(machine.path(path), Permissions::from_mode(0o755)).unwrap();
        }
        assert!(!reachable(&[machine.path("state")]).is_empty(), "the test does not find readable files");
        cluster.start();
        assert_private(machine);
    });
}

#[test]
fn containers_see_the_same_modes_when_the_umask_is_077() {
    with_mask(0o077, |machine, cluster| {
        start_pods(cluster);
        assert_private(machine);
        assert_seen(cluster);
    });
}

/// Two containers of a pod without limits. The root file system of one is read-only.
const WRITERS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: writers}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: busybox, command: [sleep, "100000"]}
  - {name: fixed, image: busybox, command: [sleep, "100000"], securityContext: {readOnlyRootFilesystem: true}}
"#;

/// Root of a pod filled the tmpfs of the run directory through `/etc/resolv.conf` and `/etc/hostname`. The node could
/// not write records then.
#[test]
fn files_and_shared_memory_of_a_pod_cannot_fill_the_run_directory() {
    with_mask(0o022, |machine, cluster| {
        cluster.apply(WRITERS);
        cluster.kubectl(&["wait", "--for=condition=Ready", "--timeout=120s", "pod/writers"]);
        let uid = cluster.get(&["pod", "writers"])["metadata"]["uid"].as_str().unwrap().to_owned();
        let of_pod = machine.path("state").join("pods").join(uid);
        for name in ["resolv.conf", "hostname"] {
            let write = format!("head -c 8388608 /dev/zero > /etc/{name}");
            let refused = cluster.try_kubectl(&["exec", "writers", "-c", "fixed", "--", "sh", "-c", &write]);
            assert!(!refused.status.success(), "{name} on a read-only root file system");
            cluster.kubectl(&["exec", "writers", "-c", "c", "--", "sh", "-c", &write]);
            // The containers of a pod share the file.
            let path = format!("/etc/{name}");
            let size = cluster.kubectl(&["exec", "writers", "-c", "fixed", "--", "stat", "-c", "%s", &path]);
            assert_eq!(size.trim(), "8388608", "{name}");
            let file = of_pod.join(format!("etc-{name}"));
            assert_eq!(fs::metadata(&file).unwrap().len(), 8 << 20, "{}", file.display());
        }
        let mut paths = Vec::new();
        every_path(&machine.path("run"), &mut paths);
        assert!(!paths.is_empty(), "the run directory is empty");
        paths.retain(|path| {
            fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.len() >= 8 << 20)
        });
        assert!(paths.is_empty(), "the pod wrote to {paths:?}");
        // The shared memory is a file system of its own.
        let fill = "dd if=/dev/zero of=/dev/shm/file bs=1M count=80";
        let full = cluster.try_kubectl(&["exec", "writers", "-c", "c", "--", "sh", "-c", fill]);
        assert!(!full.status.success(), "the shared memory has no limit");
        let size =
            cluster.kubectl(&["exec", "writers", "-c", "fixed", "--", "stat", "-c", "%s", "/dev/shm/file"]);
        let size: u64 = size.trim().parse().unwrap();
        assert!((1..=64 << 20).contains(&size), "{size} bytes");
    });
}
