//! Fixture of one test run: an image of busybox, and a runtime with its own directories, bridge, table and cgroups. At
//! the end it checks for leftovers.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_cni::{Network, NetworkConfig};
use coracle_cri::{CgroupDriver, NriSettings, Runtime, RuntimeConfig};
use coracle_images::{Images, ImagesConfig};
use coracle_integration::end_cgroup;
use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::{Suite, Test, eventually_async, until, within_async};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tonic::{Request, Status};

/// The only image: busybox.
pub(crate) const IMAGE: &str = "registry.test/busybox:latest";

/// The `main` of a test program: arguments, and the machine that all tests share.
pub(crate) struct Session {
    suite: Suite,
    /// None if tests are only listed.
    shared: Option<Arc<Mutex<Shared>>>,
}

/// Tests lock it one after the other; a test that panics poisons the lock.
pub(crate) struct Shared {
    pub(crate) runtime: tokio::runtime::Runtime,
    pub(crate) machine: Machine,
}

/// A test's name, and a function that runs it.
pub(crate) type NamedTest = (&'static str, fn(&mut Shared));

/// The tests of a program, each an `async fn(&mut Machine)`, for [`Session::run`].
macro_rules! tests {
    ($($test:path),* $(,)?) => {
        vec![$((stringify!($test), (|shared: &mut $crate::fixture::Shared| {
            shared.runtime.block_on($test(&mut shared.machine));
        }) as fn(&mut $crate::fixture::Shared))),*]
    };
}
pub(crate) use tests;

// === impl Session ===

impl Session {
    /// Parses the arguments and unshares namespaces. If the first argument is `shim`, this process runs the shim of a
    /// pod instead; the error is then its exit code.
    pub(crate) fn begin(namespaces: CloneFlags) -> Result<Self, ExitCode> {
        let arguments: Vec<String> = std::env::args().collect();
        if arguments.get(1).is_some_and(|role| role == "shim") {
            let dir = arguments.last().cloned().unwrap_or_default().into();
            return Err(coracle_shim::main(coracle_shim::ShimArgs { dir }));
        }
        let suite = Suite::from_args();
        if !suite.is_run() {
            return Ok(Self { suite, shared: None });
        }
        assert!(nix::unistd::geteuid().is_root(), "needs root: it runs containers");
        // The runtime's warnings, which may explain a failure.
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_ansi(false)
            .with_writer(std::io::stderr)
            .init();
        // This comes before any thread starts, because a running thread stays in the old namespaces.
        unshare(namespaces).expect("new namespaces");
        if namespaces.contains(CloneFlags::CLONE_NEWNS) {
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("runtime");
        let machine = runtime.block_on(Machine::new());
        Ok(Self { suite, shared: Some(Arc::new(Mutex::new(Shared { runtime, machine }))) })
    }

    /// Runs the tests in this order. Fails if a test fails or leaves anything behind.
    pub(crate) fn run(self, tests: Vec<NamedTest>) -> ExitCode {
        let Self { suite, shared } = self;
        let boxed = tests.into_iter().map(|(name, test)| -> Test {
            let shared = shared.clone();
            let run = move || {
                let shared = shared.expect("a test runs on the machine");
                test(&mut shared.lock().unwrap_or_else(PoisonError::into_inner));
            };
            (name, Box::new(run))
        });
        let code = suite.run(boxed.collect());
        if let Some(shared) = shared.and_then(Arc::into_inner) {
            let Shared { runtime, machine } = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
            if code == ExitCode::SUCCESS {
                runtime.block_on(machine.close());
            }
        }
        code
    }
}

/// The machine. `runtime` is replaced when the agent "restarts".
pub(crate) struct Machine {
    pub(crate) runtime: Runtime,
    dir: TempDir,
    images: Images,
    network: Network,
    cgroup_root: String,
}

impl Machine {
    /// Creates directories, image and runtime.
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let layout = layout(dir.path());
        let images = open_images(dir.path()).await;
        images.import(&layout, Some(IMAGE)).await.expect("import");
        let network = open_network(dir.path()).await;
        network.set_pod_cidrs(vec!["10.88.0.0/24".parse().expect("range")]).await.expect("range");
        let cgroup_root = match cgroup_driver() {
            CgroupDriver::Cgroupfs => format!("/coracle-cri-test-{}", std::process::id()),
            CgroupDriver::Systemd => format!("/coraclecritest{}.slice", std::process::id()),
        };
        let runtime = open(dir.path(), &cgroup_root, &images, &network).await;
        Self { runtime, dir, images, network, cgroup_root }
    }

    /// The directory of the runtime's CDI files.
    #[allow(dead_code, reason = "only some of the test programs use devices")]
    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.dir.path().join("cdi")
    }

    /// Enables the loopback interface, for clients of the streams.
    pub(crate) fn loopback_up(&self) {
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().expect("ip");
        assert!(up.success());
    }

    /// Closes the runtime, and replaces it by a runtime without state.
    pub(crate) async fn close_runtime(&mut self) {
        let network = self.other_network().await;
        self.close_runtime_for(&network).await;
    }

    async fn close_runtime_for(&mut self, network: &Network) {
        let empty = self.dir.path().join("nothing");
        let mut closed = self.runtime.changes();
        self.runtime = open(&empty, &self.cgroup_root, &self.images, network).await;
        // The old runtime's tasks must end before another runtime uses the same directory.
        let ended = async { while closed.changed().await.is_ok() {} };
        tokio::time::timeout(Duration::from_secs(60), ended)
            .await
            .expect("tasks of the closed runtime still run");
    }

    pub(crate) async fn open_runtime(&mut self) {
        self.runtime = open(self.dir.path(), &self.cgroup_root, &self.images, &self.network).await;
    }

    /// Like `open_runtime`, with other settings.
    pub(crate) async fn open_runtime_with(&mut self, change: impl FnOnce(&mut RuntimeConfig)) {
        self.try_open_runtime_with(change).await.expect("runtime");
    }

    /// Like `open_runtime_with`, for a runtime that may fail to start.
    pub(crate) async fn try_open_runtime_with(
        &mut self,
        change: impl FnOnce(&mut RuntimeConfig),
    ) -> Result<(), coracle_cri::Error> {
        let mut config = config(self.dir.path(), &self.cgroup_root);
        change(&mut config);
        self.runtime = Runtime::open(config, self.images.clone(), self.network.clone()).await?;
        Ok(())
    }

    /// Stops the runtime, and starts it again after a while.
    pub(crate) async fn restart(&mut self, away: Duration) {
        self.close_runtime().await;
        tokio::time::sleep(away).await;
        self.open_runtime().await;
    }

    /// Closes everything, so that another process can use it ([`Machine::borrowed`]).
    #[allow(dead_code, reason = "only some of the test programs have such a process")]
    pub(crate) async fn lend(&mut self) {
        self.images = open_images(&self.path("nothing")).await;
        let network = self.other_network().await;
        self.close_runtime_for(&network).await;
        self.network = network;
    }

    /// Opens the runtime again, after the other process has ended.
    #[allow(dead_code, reason = "only some of the test programs have such a process")]
    pub(crate) async fn take_back(&mut self) {
        self.images = open_images(self.dir.path()).await;
        self.network = open_network(self.dir.path()).await;
        self.network.set_pod_cidrs(vec!["10.88.0.0/24".parse().expect("range")]).await.expect("range");
        self.open_runtime().await;
    }

    /// A runtime in the directory of a machine that another process has set up.
    #[allow(dead_code, reason = "only some of the test programs have such a process")]
    pub(crate) async fn borrowed(dir: &Path, cgroup_root: &str) -> Runtime {
        let network = open_network(dir).await;
        network.set_pod_cidrs(vec!["10.88.0.0/24".parse().expect("range")]).await.expect("range");
        open(dir, cgroup_root, &open_images(dir).await, &network).await
    }

    /// A path in the machine's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The cgroup that contains all cgroups of the runtime.
    pub(crate) fn cgroup_root(&self) -> &str {
        &self.cgroup_root
    }

    /// The cgroup of a pod, as in its configuration.
    fn pod_group(&self, name: &str) -> String {
        match self.cgroup_root.strip_suffix(".slice") {
            None => format!("{}/kubepods/pod-{name}", self.cgroup_root),
            Some(root) => format!("{root}.slice{root}-{}.slice", name.replace('-', "_")),
        }
    }

    /// The cgroup of a container of this pod.
    #[allow(dead_code, reason = "only some of the test programs use it")]
    pub(crate) fn container_group(&self, pod: &str, id: &str) -> String {
        let pod = self.pod_group(pod);
        if pod.ends_with(".slice") { format!("{pod}/cri-coracle-{id}.scope") } else { format!("{pod}/{id}") }
    }

    async fn other_network(&self) -> Network {
        let dir = self.dir.path().join("nothing");
        let config =
            NetworkConfig::of_default_network(dir.join("cni"), dir.join("root"), "corcri1", "corcri1");
        Network::open(config).await.expect("network")
    }

    pub(crate) async fn pod(&self, name: &str) -> String {
        self.try_pod(name, |_| {}).await.expect("sandbox")
    }

    pub(crate) async fn try_pod(
        &self,
        name: &str,
        change: impl FnOnce(&mut cri::PodSandboxConfig),
    ) -> Result<String, Status> {
        let mut config = self.pod_config(name);
        change(&mut config);
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        Ok(self.runtime.run_pod_sandbox(Request::new(request)).await?.into_inner().pod_sandbox_id)
    }

    /// The configuration of a pod.
    pub(crate) fn pod_config(&self, name: &str) -> cri::PodSandboxConfig {
        let metadata = cri::PodSandboxMetadata {
            name: name.into(),
            uid: format!("uid-{name}"),
            namespace: "default".into(),
            attempt: 0,
        };
        let dns = cri::DnsConfig { servers: vec!["10.43.0.10".into()], ..Default::default() };
        let options =
            cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() };
        cri::PodSandboxConfig {
            metadata: Some(metadata),
            hostname: format!("host-{name}"),
            log_directory: self.dir.path().join("logs").join(name).to_string_lossy().into_owned(),
            dns_config: Some(dns),
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: self.pod_group(name),
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: Some(options),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    pub(crate) async fn create(
        &self,
        pod: &str,
        name: &str,
        command: &[&str],
        change: impl FnOnce(&mut cri::ContainerConfig),
    ) -> Result<String, Status> {
        let mut config = container_config(name, command);
        change(&mut config);
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: pod.into(),
            config: Some(config),
            sandbox_config: None,
        };
        Ok(self.runtime.create_container(Request::new(request)).await?.into_inner().container_id)
    }

    pub(crate) async fn start(&self, id: &str) {
        self.try_start(id).await.expect("start");
    }

    pub(crate) async fn try_start(&self, id: &str) -> Result<(), Status> {
        let request = cri::StartContainerRequest { container_id: id.into() };
        self.runtime.start_container(Request::new(request)).await.map(|_| ())
    }

    pub(crate) async fn remove(&self, id: &str) {
        let request = cri::RemoveContainerRequest { container_id: id.into() };
        self.runtime.remove_container(Request::new(request)).await.expect("remove");
    }

    pub(crate) async fn run(&self, pod: &str, name: &str, command: &[&str]) -> String {
        let id = self.create(pod, name, command, |_| {}).await.expect("create");
        self.start(&id).await;
        id
    }

    pub(crate) async fn stop(&self, id: &str, timeout: i64) {
        let request = cri::StopContainerRequest { container_id: id.into(), timeout };
        self.runtime.stop_container(Request::new(request)).await.expect("stop");
    }

    pub(crate) async fn remove_pod(&self, id: &str) {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.into() };
        self.runtime.stop_pod_sandbox(Request::new(request)).await.expect("stop sandbox");
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.into() };
        self.runtime.remove_pod_sandbox(Request::new(request)).await.expect("remove sandbox");
    }

    pub(crate) async fn exec(
        &self,
        id: &str,
        command: &[&str],
        timeout: i64,
    ) -> Result<cri::ExecSyncResponse, Status> {
        let cmd = command.iter().map(|word| (*word).to_owned()).collect();
        let request = cri::ExecSyncRequest { container_id: id.into(), cmd, timeout };
        self.runtime.exec_sync(Request::new(request)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn status(&self, id: &str) -> cri::ContainerStatus {
        self.full_status(id).await.status.expect("status")
    }

    async fn full_status(&self, id: &str) -> cri::ContainerStatusResponse {
        let request = cri::ContainerStatusRequest { container_id: id.into(), verbose: true };
        self.runtime.container_status(Request::new(request)).await.expect("status").into_inner()
    }

    pub(crate) async fn sandbox(&self, id: &str) -> cri::PodSandboxStatus {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose: true };
        let answer =
            self.runtime.pod_sandbox_status(Request::new(request)).await.expect("status").into_inner();
        answer.status.expect("status")
    }

    pub(crate) async fn wait_exited(&self, id: &str) -> cri::ContainerStatus {
        eventually_async(&format!("container {id} ends"), 20, async || {
            let status = self.status(id).await;
            (status.state == i32::from(cri::ContainerState::ContainerExited)).then_some(status)
        })
        .await
    }

    pub(crate) async fn pid(&self, id: &str) -> i32 {
        number(&self.full_status(id).await.info["info"], "pid")
    }

    pub(crate) async fn shim_pid(&self, id: &str) -> i32 {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose: true };
        let answer =
            self.runtime.pod_sandbox_status(Request::new(request)).await.expect("status").into_inner();
        number(&answer.info["info"], "pid")
    }

    /// All objects that the runtime made: directories, cgroups, interfaces, mounts. Waits for the asynchronous
    /// removal of layers and interfaces.
    pub(crate) async fn traces(&self) -> Vec<String> {
        let _is_removed = within_async(10, || !self.leaving()).await;
        self.traces_now()
    }

    /// Whether a layer without container or an interface without sandbox exists.
    fn leaving(&self) -> bool {
        let names = |dir: &str| -> Vec<String> {
            let paths = list(&self.dir.path().join(dir));
            paths.iter().filter_map(|path| Some(path.rsplit_once('/')?.1.to_owned())).collect()
        };
        let (sandboxes, containers) = (names("state/sandboxes"), names("state/containers"));
        // The result of an attachment is also on record while its interface is being removed. So only results of
        // existing sandboxes count.
        let result = |id: &String| self.dir.path().join("state/cni/results").join(format!("{id}.json"));
        let results = sandboxes.iter().filter_map(|id| std::fs::read_to_string(result(id)).ok());
        let results: Vec<String> = results.collect();
        let owned = |name: &String| results.iter().any(|result| result.contains(&format!("\"{name}\"")));
        interfaces().iter().any(|name| !owned(name))
            || names("root/containers").iter().any(|layer| !containers.contains(layer))
    }

    fn traces_now(&self) -> Vec<String> {
        let mut traces = Vec::new();
        for dir in ["state/sandboxes", "state/containers", "root/containers"] {
            traces.extend(list(&self.dir.path().join(dir)));
        }
        for hierarchy in ["/memory", "/cpu", "/pids", ""] {
            let root = format!("/sys/fs/cgroup{hierarchy}{}", self.cgroup_root);
            for parent in list(&PathBuf::from(root).join("kubepods")) {
                traces.extend(list(Path::new(&parent)).into_iter().filter(|path| Path::new(path).is_dir()));
            }
        }
        traces.extend(interfaces());
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let dir = self.dir.path().to_string_lossy().into_owned();
        traces.extend(mounts.lines().filter(|line| line.contains(&dir)).map(str::to_owned));
        traces.sort_unstable();
        traces
    }

    /// Fails if anything is left.
    pub(crate) async fn close(self) {
        assert_eq!(self.traces().await, Vec::<String>::new());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Pods outlive their runtime; a failed test may have left some.
        end_cgroup(&self.cgroup_root);
    }
}

/// A container's security context.
pub(crate) fn security(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

/// The configuration of a container.
pub(crate) fn container_config(name: &str, command: &[&str]) -> cri::ContainerConfig {
    let mut config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() }),
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        log_path: format!("{name}/0.log"),
        ..Default::default()
    };
    security(&mut config).namespace_options =
        Some(cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() });
    config
}

/// Waits until a count stays the same for half a second, and returns it.
pub(crate) async fn constant(count: impl Fn() -> usize) -> usize {
    let (mut last, mut same) = (count(), 0);
    until("a count that stays the same", 20, || {
        let now = count();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        (same == 12).then_some(now)
    })
    .await
}

/// Waits until a killed process has ended. Its cgroup is empty slightly earlier.
#[allow(dead_code, reason = "only some of the test programs kill processes")]
pub(crate) async fn ends(pid: i32) {
    eventually_async(&format!("process {pid} ends"), 20, async || !alive(pid)).await;
}

/// Whether a process still has memory, and so may still run.
#[allow(dead_code, reason = "only some of the test programs kill processes")]
pub(crate) fn has_memory(pid: i32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

/// Whether a process runs.
pub(crate) fn alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn number(info: &str, name: &str) -> i32 {
    let info: serde_json::Value = serde_json::from_str(info).expect("info");
    info[name].as_i64().and_then(|value| i32::try_from(value).ok()).expect("a pid")
}

/// The host ends of the pods' veth pairs. `/sys/class/net` would show the interfaces of the namespace in which sysfs
/// was mounted.
fn interfaces() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/net/dev").expect("interfaces");
    let names = text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    names.filter(|name| name.starts_with("veth")).map(str::to_owned).collect()
}

fn list(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path().to_string_lossy().into_owned()).collect()
}

async fn open_images(dir: &Path) -> Images {
    Images::open(ImagesConfig::new(dir.join("root"))).await.expect("images")
}

async fn open_network(dir: &Path) -> Network {
    let config =
        NetworkConfig::of_default_network(dir.join("state/cni"), dir.join("root/cni"), "corcri0", "corcri");
    Network::open(config).await.expect("network")
}

/// The cgroup driver, from the environment.
fn cgroup_driver() -> CgroupDriver {
    match std::env::var("CGROUP_DRIVER").as_deref() {
        Ok("systemd") => CgroupDriver::Systemd,
        _ => CgroupDriver::Cgroupfs,
    }
}

async fn open(dir: &Path, cgroup_root: &str, images: &Images, network: &Network) -> Runtime {
    Runtime::open(config(dir, cgroup_root), images.clone(), network.clone()).await.expect("runtime")
}

fn config(dir: &Path, cgroup_root: &str) -> RuntimeConfig {
    let nri = NriSettings {
        socket: Some(dir.join("nri.sock")),
        plugins: Some(dir.join("plugins")),
        configs: dir.join("plugins.d"),
        // Long enough for a slow machine: a plugin that responds is never dropped.
        request_timeout: Duration::from_secs(30),
        registration_timeout: Duration::from_secs(120),
        ..NriSettings::default()
    };
    RuntimeConfig {
        nri,
        root: dir.join("root"),
        state: dir.join("state"),
        cgroup_root: cgroup_root.to_owned(),
        cgroup_driver: cgroup_driver(),
        shim_binary: std::env::current_exe().expect("the path of this program"),
        cdi_dirs: vec![dir.join("cdi")],
        ..Default::default()
    }
}

/// An OCI layout with one layer: busybox with a link for each applet.
fn layout(dir: &Path) -> PathBuf {
    let root = dir.join("rootfs");
    for part in ["bin", "etc", "tmp", "proc", "sys", "dev"] {
        std::fs::create_dir_all(root.join(part)).expect("directory");
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox");
    let names = Command::new("/bin/busybox").arg("--list").output().expect("busybox runs").stdout;
    for name in String::from_utf8_lossy(&names).lines().filter(|name| *name != "busybox") {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).expect("link");
    }
    std::fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").expect("passwd");
    std::fs::write(root.join("etc/group"), "root:x:0:\nextra:x:77:root\n").expect("group");
    let layout = dir.join("layout");
    let blobs = layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("directory");
    let tar = dir.join("layer.tar");
    let made = Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&tar).arg(".").status().expect("tar");
    assert!(made.success());
    let put = |bytes: &[u8]| {
        let digest = hex::encode(Sha256::digest(bytes));
        std::fs::write(blobs.join(&digest), bytes).expect("blob");
        (format!("sha256:{digest}"), bytes.len())
    };
    let (layer, layer_size) = put(&std::fs::read(&tar).expect("layer"));
    let config = serde_json::json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": { "Env": ["PATH=/bin"], "Cmd": ["sh"] },
        "rootfs": { "type": "layers", "diff_ids": [layer] },
        "history": [],
    });
    let (config, config_size) = put(config.to_string().as_bytes());
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": config_size },
        "layers": [{ "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": layer_size }],
    });
    let (manifest, manifest_size) = put(manifest.to_string().as_bytes());
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest,
            "size": manifest_size,
            "annotations": { "org.opencontainers.image.ref.name": "latest" },
        }],
    });
    std::fs::write(layout.join("index.json"), index.to_string()).expect("index");
    std::fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("layout");
    layout
}
