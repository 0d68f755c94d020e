//! A machine of a test's own: a network namespace with one uplink and no default route, directories, a
//! cgroup, a registry server.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sched::{CloneFlags, unshare};

use crate::{end_cgroup, eventually};

/// The address of the machine's uplink.
const ADDRESS: &str = "198.51.100.10";

/// Where a test's things are.
pub struct Machine {
    dir: tempfile::TempDir,
    name: String,
    registry: Option<Child>,
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Runs the test on a thread whose network is its own; so is that of every process it starts.
///
/// # Panics
/// When the test does, and when this is not run as root.
pub fn on_a_machine(test: impl FnOnce(&mut Machine) + Send + 'static) {
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        let mut machine = Machine::new();
        test(&mut machine);
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
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
        Self { dir: tempfile::tempdir().unwrap(), name, registry: None }
    }

    /// A path in the machine's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What only this machine's things are called, and its cgroup: `/<name>`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The built binary.
    ///
    /// # Panics
    /// When it is not built.
    #[must_use]
    pub fn coracle() -> PathBuf {
        let built = repository().join("target/coracle");
        let path = std::env::var_os("CORACLE").map_or(built, PathBuf::from);
        assert!(path.exists(), "{} is not built: run scripts/build", path.display());
        path
    }

    /// The real kubectl of a minor version.
    #[must_use]
    pub fn kubectl(version: &str) -> PathBuf {
        Self::tool(&format!("kubectl-{version}"), &format!("scripts/kubectl {version}"))
    }

    /// A published program that a script of ours has put into target/tools.
    ///
    /// # Panics
    /// When it is not there.
    #[must_use]
    pub fn tool(name: &str, script: &str) -> PathBuf {
        let path = repository().join("target/tools").join(name);
        assert!(path.exists(), "{} is not there: run {script}", path.display());
        path
    }

    /// Starts the real registry server with our images, and leads docker.io to it. The mirror settings'
    /// directory.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_registry(&mut self) -> PathBuf {
        self.start_registry_at("127.0.0.1")
    }

    /// The same for machines that reach this one by an address.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_registry_at(&mut self, address: &str) -> PathBuf {
        let (data, mirrors) = (self.path("registry"), self.path("mirrors"));
        let address: IpAddr = address.parse().unwrap();
        // References to images have no IPv6 addresses for those who push.
        let (listening, pushed) = match address {
            IpAddr::V4(_) => (SocketAddr::new(address, 5005), address),
            IpAddr::V6(_) => ((Ipv6Addr::UNSPECIFIED, 5005).into(), Ipv4Addr::LOCALHOST.into()),
        };
        let at = SocketAddr::new(address, 5005);
        fs::create_dir_all(mirrors.join("docker.io")).unwrap();
        let hosts = format!(
            "server = \"https://registry-1.docker.io\"\n[host.\"http://{at}\"]\n\
             capabilities = [\"pull\", \"resolve\"]\n"
        );
        fs::write(mirrors.join("docker.io/hosts.toml"), hosts).unwrap();
        let config = format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '{listening}'}}\n",
            data.display()
        );
        fs::write(self.path("registry.yml"), config).unwrap();
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
        for image in ["nginx", "busybox"] {
            let from = format!("oci:{}:latest", repository().join("target/images").join(image).display());
            let to = format!("docker://{pushed}:5005/library/{image}:latest");
            run("skopeo", &["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", &from, &to]);
        }
        mirrors
    }

    /// Puts an image into the registry that runs on loopback: `busybox` with a file of so many megabytes of its own,
    /// which take next to nothing on their way.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn push_image(&self, name: &str, megabytes: usize) {
        let root = self.path(&format!("{name}.root"));
        fs::create_dir_all(&root).unwrap();
        let words = format!("{name}\n").repeat((megabytes << 20) / (name.len() + 1));
        fs::write(root.join(name), words).unwrap();
        self.push_root(name, &root, &[]);
    }

    /// Puts an image into the registry that runs on loopback: `busybox` with the files below `root`, and flags of
    /// `scripts/oci-layout` for its configuration.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn push_root(&self, name: &str, root: &Path, flags: &[&str]) {
        let layout = self.path(&format!("{name}.oci"));
        let [pack, base] =
            ["scripts/oci-layout", "target/images/busybox"].map(|path| repository().join(path));
        let [pack, base, root, out] = [&pack, &base, root, &layout].map(|path| path.to_str().unwrap());
        run(pack, &[&[root, out, "--base", base], flags].concat());
        let (from, to) =
            (format!("oci:{out}:latest"), format!("docker://127.0.0.1:5005/library/{name}:latest"));
        run("skopeo", &["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", &from, &to]);
    }

    /// Ends the registry server.
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
        // Pods outlive what runs them, also what a failed test has not ended.
        end_cgroup(&self.name);
    }
}

/// The repository's root.
fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Runs a program to its end; its output.
///
/// # Panics
/// When it fails.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
