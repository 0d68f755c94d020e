//! The machine of one test: a network namespace with one uplink and no default route, directories, a cgroup, a registry
//! server.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use coracle_testing::{in_new_namespace, run};

use crate::registry_storage::add_image;
use crate::{end_cgroup, eventually};

/// The address of the machine's uplink.
const ADDRESS: &str = "198.51.100.10";

/// Resources of one test. Dropping it ends all processes in its cgroup.
pub struct Machine {
    dir: tempfile::TempDir,
    /// The run directory: on a tmpfs if there is one, like `/run` of users' machines. There a small file needs no inode of
    /// the disk, and no call waits for the disk.
    run: tempfile::TempDir,
    name: String,
    registry: Option<Child>,
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Runs a test on a new thread in a new network namespace. Processes that it starts inherit the namespace.
///
/// # Panics
/// When the test panics, or without root privileges.
pub fn on_a_machine(test: impl FnOnce(&mut Machine) + Send + 'static) {
    in_new_namespace(move || {
        let mut machine = Machine::new();
        test(&mut machine);
    });
}

// === impl Machine ===

impl Machine {
    fn new() -> Self {
        run("ip", &["link", "set", "lo", "up"]);
        run("ip", &["link", "add", "uplink0", "type", "veth", "peer", "name", "uplink1"]);
        run("ip", &["addr", "add", &format!("{ADDRESS}/24"), "dev", "uplink0"]);
        run("ip", &["link", "set", "uplink0", "up"]);
        run("ip", &["link", "set", "uplink1", "up"]);
        let name = format!("coracle-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let memory = ["/run", "/dev/shm"].map(Path::new).into_iter().find(|path| is_tmpfs(path));
        let run = memory.map_or_else(tempfile::tempdir, tempfile::tempdir_in).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), run, name, registry: None }
    }

    /// A path in the machine's directory. `run` is the run directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        let path = Path::new(name);
        let directory = if path.starts_with("run") { &self.run } else { &self.dir };
        directory.path().join(path)
    }

    /// A unique name. The machine's cgroup is `/<name>`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the binary under test: `$CORACLE` or `target/coracle`.
    ///
    /// # Panics
    /// When it does not exist.
    #[must_use]
    pub fn coracle() -> PathBuf {
        let built = repository().join("target/coracle");
        let path = std::env::var_os("CORACLE").map_or(built, PathBuf::from);
        assert!(path.exists(), "{} is not built: run scripts/build", path.display());
        path
    }

    /// Path of kubectl of a minor version.
    #[must_use]
    pub fn kubectl(version: &str) -> PathBuf {
        Self::tool(&format!("kubectl-{version}"), &format!("scripts/kubectl {version}"))
    }

    /// Path of a program in target/tools. `script` is the command that installs it.
    ///
    /// # Panics
    /// When it does not exist.
    #[must_use]
    pub fn tool(name: &str, script: &str) -> PathBuf {
        let path = repository().join("target/tools").join(name);
        assert!(path.exists(), "{} does not exist: run {script}", path.display());
        path
    }

    /// Starts a registry server with the test images on loopback. Returns a directory with mirror settings that redirect
    /// docker.io to it.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_registry(&mut self) -> PathBuf {
        self.start_registry_at("127.0.0.1")
    }

    /// Like [`start_registry`](Self::start_registry), at an address that other hosts can reach.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_registry_at(&mut self, address: &str) -> PathBuf {
        let (data, mirrors) = (self.path("registry"), self.path("mirrors"));
        let address: IpAddr = address.parse().unwrap();
        let at = SocketAddr::new(address, 5005);
        fs::create_dir_all(mirrors.join("docker.io")).unwrap();
        let hosts = format!(
            "server = \"https://registry-1.docker.io\"\n[host.\"http://{at}\"]\n\
             capabilities = [\"pull\", \"resolve\"]\n"
        );
        fs::write(mirrors.join("docker.io/hosts.toml"), hosts).unwrap();
        let config = format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '{at}'}}\n",
            data.display()
        );
        fs::write(self.path("registry.yml"), config).unwrap();
        for image in ["nginx", "busybox"] {
            let layout = repository().join("target/images").join(image);
            add_image(&data, &layout, &format!("library/{image}"));
        }
        let log = fs::File::create(self.path("registry.log")).unwrap();
        let server = Command::new("docker-registry")
            .arg("serve")
            .arg(self.path("registry.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.registry = Some(server);
        eventually("the registry", 10, || std::net::TcpStream::connect(at).ok());
        mirrors
    }

    /// Adds an image to the registry: `busybox` with one more file of `megabytes` MiB, which compresses well.
    ///
    /// # Panics
    /// When the image cannot be built.
    pub fn push_image(&self, name: &str, megabytes: usize) {
        let root = self.path(&format!("{name}.root"));
        fs::create_dir_all(&root).unwrap();
        let content = format!("{name}\n").repeat((megabytes << 20) / (name.len() + 1));
        fs::write(root.join(name), content).unwrap();
        self.push_root(name, &root, &[]);
    }

    /// Adds an image to the registry: `busybox` with the files below `root`. `flags` are those of `scripts/oci-layout` for
    /// the image configuration.
    ///
    /// # Panics
    /// When the image cannot be built.
    pub fn push_root(&self, name: &str, root: &Path, flags: &[&str]) {
        let layout = self.path(&format!("{name}.oci"));
        let [pack, base] =
            ["scripts/oci-layout", "target/images/busybox"].map(|path| repository().join(path));
        let [pack, base, root, out] = [&pack, &base, root, &layout].map(|path| path.to_str().unwrap());
        run(pack, &[&[root, out, "--base", base], flags].concat());
        add_image(&self.path("registry"), &layout, &format!("library/{name}"));
    }

    /// Adds the sandbox image of containerd to the registry: `pause`, a program that sleeps.
    ///
    /// # Panics
    /// When the image cannot be built.
    pub fn push_sandbox_image(&self) {
        let root = self.path("pause.root");
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("pause"), "").unwrap();
        self.push_root("pause", &root, &["--cmd", "sleep", "1000000"]);
    }

    /// Adds an image for one other architecture to the registry: an index with `busybox`, which names the architecture.
    ///
    /// # Panics
    /// When the image cannot be built.
    pub fn push_for_architecture(&self, name: &str, architecture: &str) {
        let [root, image, layout] = ["root", "one", "oci"].map(|kind| self.path(&format!("{name}.{kind}")));
        fs::create_dir_all(&root).unwrap();
        let [pack, base] =
            ["scripts/oci-layout", "target/images/busybox"].map(|path| repository().join(path));
        let [pack, base, root, image, out] =
            [&pack, &base, &root, &image, &layout].map(|path| path.to_str().unwrap());
        run(pack, &[root, image, "--base", base, "--architecture", architecture]);
        run(pack, &["--join", out, image]);
        add_image(&self.path("registry"), &layout, &format!("library/{name}"));
    }

    /// Stops the registry server.
    pub fn stop_registry(&mut self) {
        if let Some(mut server) = self.registry.take() {
            server.kill().ok();
            server.wait().ok();
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop_registry();
        // Pods outlive the runtime. A failed test may have left some.
        end_cgroup(&self.name);
    }
}

fn is_tmpfs(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|found| found.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC)
}

/// The root directory of the repository.
#[must_use]
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}
