//! A pod for a test, and the check that nothing of it is left.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use coracle_proto::shim::{CreateContainer, Event, Exit, Overlay, SandboxConfig};
use coracle_testing::eventually_async;
use futures::StreamExt as _;
use futures::channel::mpsc::UnboundedReceiver;
use serde_json::{Value, json};

use crate::shim_client::Shim;

/// Environment variable with the run's name, for directories and cgroups. Set for the process in the pid
/// namespace.
pub(crate) const RUN: &str = "CORACLE_TEST_RUN";

pub(crate) struct Pod {
    pub(crate) dir: PathBuf,
    pub(crate) shim: Shim,
    pub(crate) events: UnboundedReceiver<Event>,
    pub(crate) cgroup: String,
    pub(crate) mounts: BTreeSet<String>,
}

/// Starts the shim of a sandbox, with its state in `dir`.
pub(crate) async fn spawn(dir: &Path, config: SandboxConfig) -> Shim {
    let (program, timeouts) = (std::env::current_exe().unwrap(), crate::shim_client::Timeouts::default());
    let (shim, _) = Shim::spawn(&program, &dir.join("shim"), config, timeouts).await.unwrap();
    shim
}

// === impl Pod ===

impl Pod {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut SandboxConfig)) -> Self {
        let (dir, cgroup) = places();
        let mounts = mounts();
        make_lower(&dir);
        let mut config = config(&dir, &cgroup);
        change(&mut config);
        let began = Instant::now();
        let shim = spawn(&dir, config).await;
        println!("  spawn {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
        let events = shim.events().unwrap();
        Self { dir, shim, events, cgroup, mounts }
    }

    /// A spec that runs the script under `sh -c`. The test may change it before the create.
    pub(crate) fn spec(&self, id: &str, script: &str) -> Value {
        spec(self.shim.pid(), &format!("{}/{id}", self.cgroup), script)
    }

    pub(crate) fn create_request(&self, id: &str, spec: &Value) -> CreateContainer {
        create_request(&self.dir, id, spec)
    }

    /// Creates and starts a container.
    pub(crate) async fn run(&self, id: &str, script: &str) -> i32 {
        let create = self.create_request(id, &self.spec(id, script));
        self.run_request(create).await
    }

    pub(crate) async fn run_request(&self, create: CreateContainer) -> i32 {
        let id = create.container_id.clone();
        let began = Instant::now();
        let pid = self.shim.create(create).await.unwrap();
        let created = began.elapsed();
        self.shim.start(&id).await.unwrap();
        let (created, started) = (created.as_secs_f64() * 1e3, began.elapsed().as_secs_f64() * 1e3);
        println!("  {id}: created {created:.1} ms, started {started:.1} ms");
        pid
    }

    /// The next exit event, which must be of that container or exec.
    pub(crate) async fn exit(&mut self, container_id: &str, exec_id: &str) -> Exit {
        let event = self.events.next().await.expect("an event");
        assert_eq!((event.container_id.as_str(), event.exec_id.as_str()), (container_id, exec_id));
        self.shim.acknowledge(event.sequence).await.unwrap();
        event.exited.unwrap()
    }

    pub(crate) fn log_path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.log"))
    }

    /// The texts of one stream in the log.
    pub(crate) fn output(&self, id: &str, stream: &str) -> Vec<String> {
        let log = fs::read_to_string(self.log_path(id)).unwrap();
        let parts = log.lines().map(|line| line.splitn(4, ' ').collect::<Vec<_>>());
        parts.filter(|parts| parts[1] == stream).map(|parts| parts[3].to_owned()).collect()
    }

    /// Waits until the log contains the text.
    pub(crate) async fn until_logged(&self, id: &str, text: &str) {
        let path = self.log_path(id);
        until(|| fs::read_to_string(&path).unwrap_or_default().contains(text)).await;
    }

    /// Shuts the pod down and checks that nothing of it is left.
    pub(crate) async fn end(self) {
        self.shim.shutdown().await.unwrap();
        self.nothing_left().await;
    }

    pub(crate) async fn nothing_left(self) {
        let pid = self.shim.pid();
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the shim is still there");
        // Other tests on this machine mount and unmount meanwhile.
        let own = self.dir.to_str().unwrap();
        let leaked: Vec<String> =
            mounts().difference(&self.mounts).filter(|mount| mount.contains(own)).cloned().collect();
        assert!(leaked.is_empty(), "mounts leaked: {leaked:?}");
        for hierarchy in cgroup_mounts() {
            let root = hierarchy.join(self.cgroup.trim_start_matches('/'));
            let left: Vec<_> = fs::read_dir(&root).into_iter().flatten().flatten().collect();
            let left: Vec<_> = left.iter().filter(|e| e.path().is_dir() && e.file_name() != "shim").collect();
            assert!(left.is_empty(), "cgroups leaked: {left:?}");
        }
        for place in ["containers", "state", "exits"] {
            let left = fs::read_dir(self.dir.join("shim").join(place)).unwrap().count();
            assert_eq!(left, 0, "{place} is not empty");
        }
        remove_cgroup(&self.cgroup).await;
        fs::remove_dir_all(&self.dir).unwrap();
    }

    /// Cleans up after a pod whose shim is gone.
    pub(crate) async fn abandon(self) {
        // A process that a creator started, such as a hook, has lost its parent.
        for place in cgroup_mounts().iter().map(|mount| mount.join(self.cgroup.trim_start_matches('/'))) {
            let processes = fs::read_to_string(place.join("shim/cgroup.procs")).unwrap_or_default();
            for pid in processes.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 1) {
                let _ = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(pid),
                    nix::sys::signal::Signal::SIGKILL,
                );
            }
        }
        remove_cgroup(&self.cgroup).await;
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub(crate) fn run_name() -> String {
    std::env::var(RUN).unwrap()
}

/// Removes what a failed run left behind.
pub(crate) async fn clean(name: &str) {
    let prefix = format!("coracle-test-{name}-");
    for mount in cgroup_mounts() {
        for entry in fs::read_dir(mount).into_iter().flatten().flatten() {
            let entry = entry.file_name().to_string_lossy().into_owned();
            if entry.starts_with(&prefix) {
                remove_cgroup(&format!("/{entry}")).await;
            }
        }
    }
    let _ = fs::remove_dir_all(format!("/tmp/coracle-shim-test-{name}"));
    let _ = fs::remove_dir_all(format!("/tmp/{prefix}client"));
}

fn places() -> (PathBuf, String) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (pid, number) = (run_name(), NEXT.fetch_add(1, Ordering::Relaxed));
    // The path is long, like real paths. A socket address has room for only 108 bytes.
    let dir = format!("/tmp/coracle-shim-test-{pid}/{number}-{}", "0123456789abcdef".repeat(4));
    (PathBuf::from(dir), format!("/coracle-test-{pid}-{number}"))
}

pub(crate) fn config(dir: &Path, cgroup: &str) -> SandboxConfig {
    SandboxConfig {
        sandbox_id: "pod".into(),
        hostname: "the-pod".into(),
        own_network: true,
        own_ipc: true,
        own_uts: true,
        sysctls: [("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned())].into(),
        shim_cgroup: format!("{cgroup}/shim"),
        shm_dir: dir.join("shm").to_string_lossy().into_owned(),
        ..Default::default()
    }
}

/// A one-layer image: a static busybox with the command names that the tests use.
pub(crate) fn make_lower(dir: &Path) {
    let bin = dir.join("lower/bin");
    fs::create_dir_all(&bin).unwrap();
    fs::copy("/bin/busybox", bin.join("busybox")).unwrap();
    let names =
        "sh sleep cat echo true false grep mkdir id tty stty nc ls wc head dd hostname yes env kill mount";
    names.split(' ').for_each(|name| symlink("busybox", bin.join(name)).unwrap());
    fs::create_dir_all(dir.join("lower/etc")).unwrap();
    fs::write(
        dir.join("lower/etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
    )
    .unwrap();
    fs::write(dir.join("lower/etc/forbidden"), "not a program").unwrap();
}

pub(crate) fn create_request(dir: &Path, id: &str, spec: &Value) -> CreateContainer {
    let own = dir.join(id);
    ["upper", "work"].iter().for_each(|name| fs::create_dir_all(own.join(name)).unwrap());
    fs::write(own.join("config.json"), spec.to_string()).unwrap();
    let at = |name: &str| own.join(name).to_string_lossy().into_owned();
    CreateContainer {
        container_id: id.to_owned(),
        bundle: own.to_string_lossy().into_owned(),
        rootfs: Some(Overlay {
            lower: vec![dir.join("lower").to_string_lossy().into_owned()],
            upper: at("upper"),
            work: at("work"),
            target: at("rootfs"),
            read_only: false,
        }),
        log_path: dir.join(format!("{id}.log")).to_string_lossy().into_owned(),
        seccomp_program: without_chroot(),
        ..Default::default()
    }
}

/// The seccomp program of the profile in [`spec`]: chroot(2), which all architectures have, fails with ENOSYS. All other
/// calls are allowed.
fn without_chroot() -> Vec<u8> {
    let chroot = u32::try_from(libc::SYS_chroot).unwrap();
    // Load the call's number; chroot: return ENOSYS; else: allow.
    [
        (0x20_u16, 0_u8, 0_u8, 0_u32),
        (0x15, 0, 1, chroot),
        (0x06, 0, 0, 0x0005_0026),
        (0x06, 0, 0, 0x7fff_0000),
    ]
    .into_iter()
    .flat_map(|(code, then, otherwise, value)| {
        let (code, value) = (code.to_ne_bytes(), value.to_ne_bytes());
        [code[0], code[1], then, otherwise, value[0], value[1], value[2], value[3]]
    })
    .collect()
}

pub(crate) fn spec(shim: i32, cgroup: &str, script: &str) -> Value {
    let caps = ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID", "CAP_SETGID", "CAP_NET_BIND_SERVICE"];
    let joined = |kind: &str, file: &str| json!({ "type": kind, "path": format!("/proc/{shim}/ns/{file}") });
    json!({
        "ociVersion": "1.2.0",
        "root": { "path": "rootfs" },
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "args": ["sh", "-c", script],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "noNewPrivileges": true,
            "oomScoreAdj": 100,
            "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": 512, "hard": 1024 }],
            "capabilities": { "bounding": caps, "effective": caps, "permitted": caps },
        },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"] },
            { "destination": "/dev/pts", "type": "devpts", "source": "devpts",
              "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"] },
            { "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "rw"] },
        ],
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [
                { "type": "mount" }, { "type": "pid" }, { "type": "cgroup" },
                joined("network", "net"), joined("ipc", "ipc"), joined("uts", "uts"),
            ],
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{ "names": ["chroot"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38 }],
            },
        },
    })
}

pub(crate) async fn until(mut happened: impl FnMut() -> bool) {
    eventually_async("the condition", 20, async || happened()).await;
}

fn mounts() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    text.lines().map(|line| line.split(' ').skip(3).take(2).collect::<Vec<_>>().join(" ")).collect()
}

pub(crate) fn cgroup_mounts() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let cgroups = text.lines().filter(|line| line.contains(" - cgroup"));
    cgroups.filter_map(|line| line.split(' ').nth(4).map(PathBuf::from)).collect()
}

/// Removes a test's cgroup once it has no processes.
pub(crate) async fn remove_cgroup(cgroup: &str) {
    fn remove(at: &Path) -> bool {
        let children = fs::read_dir(at).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
        let emptied = children.filter(|child| !remove(&child.path())).count() == 0;
        emptied && (fs::remove_dir(at).is_ok() || !at.exists())
    }
    let places: Vec<_> = cgroup_mounts().iter().map(|m| m.join(cgroup.trim_start_matches('/'))).collect();
    until(|| places.iter().filter(|place| !remove(place)).count() == 0).await;
}
