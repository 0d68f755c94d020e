//! A full or read-only disk below the store.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use coracle_integration::{Kubectl, Machine, eventually, on_a_machine, wait_for_exit};
use coracle_testing::run;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A control plane whose state directory is on a small disk.
struct Plane {
    process: Child,
    kubectl: Kubectl,
}

impl Plane {
    fn start(machine: &Machine, more: &[&str]) -> Self {
        let state = machine.path("state");
        let log = File::options().create(true).append(true).open(machine.path("plane.log")).unwrap();
        let process = Command::new(Machine::coracle())
            .args(["controlplane", "--state-dir", state.to_str().unwrap()])
            .args(["--run-dir", machine.path("run").to_str().unwrap()])
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let kubectl = Kubectl::new(state.join("admin.kubeconfig"));
        let plane = Self { process, kubectl };
        eventually("the API", 30, || plane.raw("/livez").0);
        plane
    }

    fn raw(&self, path: &str) -> (bool, String) {
        self.try_run(&["get", "--raw", path])
    }

    fn try_run(&self, arguments: &[&str]) -> (bool, String) {
        let output = self.kubectl.try_kubectl(arguments);
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    fn end(mut self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.process.id()).unwrap()), signal).unwrap();
        wait_for_exit(&mut self.process);
    }
}

/// Runs the test in a mount namespace of this thread and its children. `make_disk` mounts the state directory.
pub(super) fn on_disk(
    make_disk: impl FnOnce(&Machine) + Send + 'static,
    test: impl FnOnce(&mut Machine) + Send + 'static,
) {
    on_a_machine(move |machine| {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).unwrap();
        let (none, state) = (None::<&str>, machine.path("state"));
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        fs::create_dir(&state).unwrap();
        make_disk(machine);
        test(machine);
        umount2(&state, MntFlags::MNT_DETACH).unwrap();
    });
}

/// Mounts a tmpfs on the state directory.
fn with_disk(options: &'static str, test: impl FnOnce(&Machine) + Send + 'static) {
    let tmpfs = move |machine: &Machine| {
        let state = machine.path("state");
        mount(Some("tmpfs"), &state, Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
    };
    on_disk(tmpfs, move |machine: &mut Machine| test(machine));
}

/// Mounts an ext4 of 256 MiB on the state directory that becomes read-only at its first error.
pub(super) fn with_ext4(machine: &Machine) {
    let image = machine.path("image");
    make_ext4(&image, &[]);
    let state = machine.path("state");
    let paths = [image.to_str().unwrap(), state.to_str().unwrap()];
    run("mount", &["-o", "loop,errors=remount-ro", paths[0], paths[1]]);
}

/// Like [`with_ext4`], with project quotas.
pub(super) fn with_project_quotas(machine: &Machine) {
    assert!(mount_with_project_quotas(&machine.path("image"), &machine.path("state")));
}

/// Whether the kernel mounts an ext4 with project quotas.
pub(super) fn has_project_quotas() -> bool {
    let tried = std::thread::spawn(|| {
        let dir = tempfile::tempdir().unwrap();
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).unwrap();
        let (none, at) = (None::<&str>, dir.path().join("disk"));
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        fs::create_dir(&at).unwrap();
        let is_mounted = mount_with_project_quotas(&dir.path().join("image"), &at);
        if is_mounted {
            umount2(&at, MntFlags::MNT_DETACH).unwrap();
        }
        is_mounted
    });
    tried.join().unwrap()
}

fn mount_with_project_quotas(image: &Path, at: &Path) -> bool {
    make_ext4(image, &["-O", "quota,project", "-E", "quotatype=prjquota"]);
    let mut mount = Command::new("mount");
    mount.args(["-t", "ext4", "-o", "loop,prjquota,errors=remount-ro"]).args([image, at]);
    mount.status().unwrap().success()
}

/// Creates a file with an ext4 of 256 MiB.
fn make_ext4(image: &Path, options: &[&str]) {
    File::create(image).unwrap().set_len(256 << 20).unwrap();
    let mut words = vec!["-q", "-F"];
    words.extend(options);
    words.push(image.to_str().unwrap());
    run("mkfs.ext4", &words);
}

/// Causes an error of an ext4.
fn break_ext4(at: &Path) {
    let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap();
    let mut devices = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ');
        let device = fields.next()?.strip_prefix("/dev/")?;
        (fields.next() == at.to_str()).then_some(device)
    });
    let device = devices.next().expect("the file system has a device");
    fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "test").unwrap();
}

fn fill(path: &Path) {
    let mut file = File::options().create(true).append(true).open(path).unwrap();
    while file.write_all(&[7; 4096]).is_ok() {}
}

fn names(plane: &Plane) -> String {
    plane.kubectl.kubectl(&["get", "configmaps", "-o", "name"])
}

#[test]
fn the_api_reports_a_full_disk_and_recovers_without_a_restart() {
    with_disk("size=128m,mode=0755", |machine| {
        let plane = Plane::start(machine, &[]);
        plane.kubectl.kubectl(&["create", "configmap", "before", "--from-literal=a=b"]);
        assert!(plane.raw("/readyz").0);
        let filler = machine.path("state/pods-empty-dir");
        fill(&filler);
        let (created, why) = plane.try_run(&["create", "configmap", "during", "--from-literal=a=b"]);
        assert!(!created && why.contains("database space exceeded"), "{why}");
        let (ready, text) = plane.raw("/readyz?verbose");
        assert!(!ready && text.contains("[-]store failed"), "{text}");
        assert!(!plane.raw("/readyz/store").0);
        assert!(plane.raw("/livez").0);
        assert!(names(&plane).contains("configmap/before"));
        // The reserved space is for deletions.
        plane.kubectl.kubectl(&["delete", "configmap", "before"]);
        fs::remove_file(&filler).unwrap();
        eventually("a create", 10, || {
            plane.try_run(&["create", "configmap", "after", "--from-literal=a=b"]).0
        });
        eventually("the readiness", 5, || plane.raw("/readyz").0);
        // SIGKILL and a start on a full disk.
        fill(&filler);
        plane.end(Signal::SIGKILL);
        let plane = Plane::start(machine, &[]);
        let left = names(&plane);
        assert!(
            left.contains("configmap/after") && !left.contains("before") && !left.contains("during"),
            "{left}"
        );
        plane.kubectl.kubectl(&["delete", "configmap", "after"]);
        plane.end(Signal::SIGTERM);
    });
}

/// The file system of the store becomes read-only, as ext4 does after an error. A copy on another disk then replaces it.
#[test]
fn the_api_reports_a_read_only_disk_and_recovers_without_a_restart() {
    on_disk(with_ext4, |machine| {
        let (state, copy) = (machine.path("state"), machine.path("copy"));
        let plane = Plane::start(machine, &[]);
        plane.kubectl.kubectl(&["create", "configmap", "before", "--from-literal=a=b"]);
        assert!(plane.raw("/readyz").0);
        break_ext4(&state);
        let (created, why) = plane.try_run(&["create", "configmap", "during", "--from-literal=a=b"]);
        assert!(!created && why.contains("the store cannot write to its disk"), "{why}");
        let (ready, text) = plane.raw("/readyz?verbose");
        assert!(!ready && text.contains("[-]store failed"), "{text}");
        assert!(plane.raw("/livez").0);
        assert!(names(&plane).contains("configmap/before"));
        run("cp", &["-a", state.to_str().unwrap(), copy.to_str().unwrap()]);
        mount(Some(&copy), &state, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        eventually("a create", 20, || {
            plane.try_run(&["create", "configmap", "after", "--from-literal=a=b"]).0
        });
        eventually("the readiness", 10, || plane.raw("/readyz").0);
        plane.end(Signal::SIGKILL);
        let plane = Plane::start(machine, &[]);
        let left = names(&plane);
        let has = |name: &str| left.contains(&format!("configmap/{name}"));
        assert!(has("before") && has("after") && !has("during"), "{left}");
        plane.end(Signal::SIGTERM);
        umount2(&state, MntFlags::MNT_DETACH).unwrap();
    });
}

/// Whether a file below the directory has the text.
fn has(directory: &Path, text: &str) -> bool {
    fs::read_dir(directory).unwrap().flatten().any(|entry| match entry.file_type().unwrap().is_dir() {
        true => has(&entry.path(), text),
        false => fs::read(entry.path()).unwrap().windows(text.len()).any(|bytes| bytes == text.as_bytes()),
    })
}

#[test]
fn secrets_are_encrypted_on_disk_and_keys_rotate() {
    with_disk("size=256m,mode=0755", |machine| {
        let plane = Plane::start(machine, &[]);
        let value = "aHVzaC1odXNoLWh1c2gtaHVzaA==";
        plane.kubectl.kubectl(&[
            "create",
            "secret",
            "generic",
            "key",
            "--from-literal=p=hush-hush-hush-hush",
        ]);
        plane.kubectl.kubectl(&["create", "configmap", "open", "--from-literal=p=not-a-secret-at-all"]);
        let store = machine.path("state/store");
        assert!(has(&store, "not-a-secret-at-all"), "the test does not find text of the store");
        assert!(
            !has(&store, value) && !has(&store, "hush-hush-hush-hush"),
            "a Secret is in plain text on disk"
        );
        plane.end(Signal::SIGKILL);
        // A second key, first in the file.
        let keys = machine.path("state/sealing.key");
        let old = fs::read_to_string(&keys).unwrap();
        let new = format!("second {}=\n", "A".repeat(43));
        fs::write(&keys, format!("{new}{old}")).unwrap();
        let plane = Plane::start(machine, &[]);
        let read = || plane.kubectl.kubectl(&["get", "secret", "key", "-o", "jsonpath={.data.p}"]);
        assert_eq!(read(), value);
        let id = old.split(' ').next().unwrap();
        assert!(
            !has(&store, id) && has(&store, "k8s:enc:aesgcm:v1:second:"),
            "the first key is still in use"
        );
        plane.end(Signal::SIGTERM);
        // Without the key the control plane does not start; the error names the key.
        let other = machine.path("other.key");
        fs::write(&other, old).unwrap();
        fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let output = Command::new(Machine::coracle())
            .args(["controlplane", "--state-dir", machine.path("state").to_str().unwrap()])
            .args(["--encryption-key-file", other.to_str().unwrap()])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("\"second\" is not in the key file"), "{text}");
    });
}
