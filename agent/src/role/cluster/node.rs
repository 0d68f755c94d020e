//! The processes of a cluster's nodes: their configuration, start and end.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::record::Cluster;
use crate::lock::Lock;

/// Path of this program. It is valid even after the file was replaced or removed.
const PROGRAM: &str = "/proc/self/exe";
/// Resolver configurations, the preferred one first.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// Maximum size of a resolver configuration or a log in bytes.
const TEXT_MAX: u64 = 1 << 20;
/// Maximum size of a node's command line in bytes. Any process can declare all of its memory to be its command line.
const COMMAND_LINE_MAX: u64 = 64 << 10;
/// Maximum wait for the end of a killed process, in milliseconds.
const EXIT_TIMEOUT_MS: u16 = 10_000;

/// A node of a cluster.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node<'a> {
    cluster: &'a Cluster,
    number: u8,
}

/// A started process.
pub(super) struct Started {
    /// Its exit status.
    pub(super) ended: oneshot::Receiver<io::Result<ExitStatus>>,
}

/// Role of a node in its cluster.
pub(super) enum Role<'a> {
    /// The node has the control plane.
    ControlPlane,
    /// The node joins the control plane with these arguments.
    Worker(&'a [String]),
}

// === impl Cluster ===

impl Cluster {
    pub(super) fn node(&self, number: u8) -> Node<'_> {
        Node { cluster: self, number }
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = Node<'_>> {
        self.numbers().map(move |number| self.node(number))
    }
}

// === impl Node ===

impl Node<'_> {
    pub(super) fn name(&self) -> String {
        format!("{}-{}", self.cluster.name, self.number)
    }

    fn dir(&self) -> PathBuf {
        self.cluster.state.join(self.number.to_string())
    }

    pub(super) fn run_dir(&self) -> PathBuf {
        self.cluster.run.join(self.number.to_string())
    }

    /// The kubeconfig that the control plane writes, with an address inside the host.
    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.dir().join("state/admin.kubeconfig")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.dir().join("node.log")
    }

    fn config_file(&self) -> PathBuf {
        self.dir().join("config.toml")
    }

    /// Whether the node's process runs.
    pub(super) fn is_running(&self) -> bool {
        Lock::holder(&self.run_dir()).is_some()
    }

    /// The last line of the node's log. Empty if the log is larger than 1 MiB.
    pub(super) fn last_line(&self) -> String {
        let log = coracle_agent::read_text(&self.log(), TEXT_MAX).unwrap_or_default();
        log.lines().last().unwrap_or_default().to_owned()
    }

    /// Starts the node's process inside the node's virtual host.
    pub(super) fn start(&self, role: &Role<'_>) -> anyhow::Result<Started> {
        let context = || format!("cannot start the node {}", self.name());
        self.write_config().with_context(context)?;
        let log = File::options().create(true).append(true).open(self.log()).with_context(context)?;
        let mut command = self.command(role);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // The node must not receive Ctrl-C from the terminal of `create`.
        command.process_group(0);
        let mut child = self
            .cluster
            .host(self.number)
            .run(|| command.spawn())
            .with_context(context)?
            .with_context(context)?;
        let (send, ended) = oneshot::channel();
        // A thread, not a blocking task: the shutdown of the async runtime would wait for the task.
        let thread = std::thread::Builder::new().name("node-end".to_owned());
        thread.spawn(move || drop(send.send(child.wait()))).with_context(context)?;
        Ok(Started { ended })
    }

    /// Writes the configuration file. After a crash the file is absent or complete.
    fn write_config(&self) -> io::Result<()> {
        coracle_agent::replace_private(&self.config_file(), self.config().as_bytes())
    }

    fn command(&self, role: &Role<'_>) -> Command {
        let mut command = program(std::env::vars_os().map(|(name, _)| name));
        match role {
            Role::ControlPlane => command.arg("up").arg("--config").arg(self.config_file()),
            Role::Worker(join) => command.arg("agent").arg("--config").arg(self.config_file()).args(*join),
        };
        command
    }

    /// The configuration file. JSON strings and arrays are valid TOML.
    fn config(&self) -> String {
        let Self { cluster, number } = self;
        let of_cluster = &cluster.record;
        let mut text = String::new();
        let mut put = |key: &str, value: Value| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{key} = {value}");
        };
        put("state-dir", json!(self.dir().join("state")));
        put("run-dir", json!(self.run_dir()));
        text.push_str("\n[node]\n");
        let mut put = |key: &str, value: Value| {
            let _ = writeln!(text, "{key} = {value}");
        };
        put("node-name", json!(self.name()));
        put("node-ip", json!([cluster.address(*number)]));
        put("pod-log-dir", json!(self.dir().join("logs")));
        // The nodes share no parent cgroup. The removal of one node could remove a shared parent while another node
        // starts.
        put("cgroup-root", json!(format!("/coracle-cluster-{}-{number}", cluster.name)));
        // The node does not have the plugins and networks of this machine.
        put("cni-conf-dir", json!(""));
        put("nri-socket", json!(""));
        put("nri-plugin-dir", json!(""));
        put("resolv-conf", json!(resolver(&RESOLVERS.map(|path| (path, read(path))))));
        put("image-gc-high-threshold", json!(100));
        if let Some(dir) = &of_cluster.registry_config_dir {
            put("registry-config-dir", json!(dir));
        }
        // The node is never short of resources. All nodes share the memory, disk and process IDs of this machine, and
        // would evict pods at the same time.
        text.push_str("eviction-hard = { \"nodefs.available\" = \"0%\" }\n");
        text.push_str("\n[control-plane]\n");
        let mut put = |key: &str, value: Value| {
            let _ = writeln!(text, "{key} = {value}");
        };
        put("advertise-address", json!(cluster.address(1)));
        if of_cluster.ipv6 {
            put("cluster-cidr", json!(["fd42::/48"]));
        }
        text
    }

    /// Stops the node's process, and removes its pods and directories with `coracle down` inside its host. If the host
    /// does not exist, `down` runs in an empty host, so that it does not remove interfaces of this machine.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        if !self.config_file().exists() {
            return Ok(());
        }
        let written = coracle_agent::read_text(&self.config_file(), TEXT_MAX).unwrap_or_default();
        if !is_complete(&written) {
            // With an incomplete file `down` would use the default directories, and remove the node of this machine.
            self.write_config().with_context(|| format!("cannot remove the node {}", self.name()))?;
        }
        self.down()?;
        // If `create` was killed right after it started the process, the process possibly does not hold its lock yet.
        if self.kill_others()? { self.down() } else { Ok(()) }
    }

    fn down(&self) -> anyhow::Result<()> {
        let context = || format!("cannot remove the node {}", self.name());
        // `down` refuses to stop a process without a state directory. A process that has just started may have no state
        // directory.
        fs::create_dir_all(self.dir().join("state")).with_context(context)?;
        let mut command = program(std::env::vars_os().map(|(name, _)| name));
        command.arg("down").arg("--config").arg(self.config_file()).arg("--purge");
        command.stdin(Stdio::null());
        let host = self.cluster.host(self.number);
        let output = match host.namespace_id() {
            Some(_) => host.run(|| command.output()).with_context(context)?,
            None => coracle_cni::in_empty_namespace(|| command.output()).with_context(context)?,
        };
        let output = output.with_context(context)?;
        let message = String::from_utf8_lossy(&output.stderr);
        let message = message.trim().trim_start_matches("coracle: ");
        anyhow::ensure!(output.status.success(), "cannot remove the node {}: {message}", self.name());
        Ok(())
    }

    /// Kills processes of the node in its host, and waits for their end. Returns whether there were any.
    fn kill_others(&self) -> anyhow::Result<bool> {
        let Some(namespace) = self.cluster.host(self.number).namespace_id() else { return Ok(false) };
        let config = self.config_file();
        let mut found = false;
        for entry in fs::read_dir("/proc").context("cannot list processes")?.flatten() {
            let Some(pid) =
                entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
            else {
                continue;
            };
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            // Check after opening the descriptor, so that the checked process is the one to kill.
            if !runs(&entry.path(), namespace, &config) {
                continue;
            }
            found = true;
            match pidfd_send_signal(&process, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(errno) => return Err(errno).context("cannot stop a process of the node"),
            }
            poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], PollTimeout::from(EXIT_TIMEOUT_MS))?;
        }
        Ok(found)
    }
}

/// Whether a configuration file is complete: it has its last setting. A power failure may truncate a file.
fn is_complete(config: &str) -> bool {
    config.contains("\nadvertise-address = ")
}

/// A command that runs this program without the environment variables of coracle's settings. Such variables would
/// override the configuration file, and `down` would remove another node.
fn program(variables: impl Iterator<Item = OsString>) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg0("coracle");
    for name in variables.filter(|name| name.as_encoded_bytes().starts_with(b"CORACLE_")) {
        command.env_remove(name);
    }
    command
}

/// Whether the process with this directory in /proc is in the namespace and has the configuration file as an argument.
fn runs(process: &Path, namespace: u64, config: &Path) -> bool {
    let link = fs::read_link(process.join("ns/net")).unwrap_or_default();
    let command = coracle_tree::read(&process.join("cmdline"), COMMAND_LINE_MAX).unwrap_or_default();
    link.as_os_str() == format!("net:[{namespace}]").as_str()
        && command.split(|byte| *byte == 0).any(|word| word == config.as_os_str().as_encoded_bytes())
}

fn read(path: &str) -> String {
    coracle_agent::read_text(Path::new(path), TEXT_MAX).unwrap_or_default()
}

/// The first resolver configuration with a server that is not on loopback: the node cannot reach loopback of this
/// machine.
fn resolver<'a>(files: &[(&'a str, String)]) -> &'a str {
    let has_servers = |text: &str| {
        let servers = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
        let mut addresses = servers.filter_map(|rest| rest.trim().parse::<std::net::IpAddr>().ok());
        addresses.any(|address| !address.is_loopback())
    };
    files.iter().find(|(_, text)| has_servers(text)).map_or("", |(path, _)| path)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::record::{Name, Roots, Settings};
    use super::{is_complete, program, resolver};

    #[test]
    fn a_configuration_that_a_crash_left_empty_becomes_complete() {
        let directory = tempfile::tempdir().expect("directory");
        let roots = Roots { state: directory.path().join("state"), run: directory.path().join("run") };
        let name: Name = "a".parse().expect("name");
        let _lock = roots.lock_cluster(&name).expect("lock");
        let settings = Settings { nodes: 1, ipv6: false, registry_config_dir: None };
        let cluster = roots.record(&name, &settings).expect("record");
        let node = cluster.node(1);
        fs::create_dir_all(node.dir()).expect("directory");
        fs::write(node.config_file(), "").expect("empty");
        node.write_config().expect("written");
        let text = fs::read_to_string(node.config_file()).expect("text");
        assert!(text.starts_with("state-dir = ") && is_complete(&text), "{text}");
        assert!(
            text.contains("\neviction-hard = { \"nodefs.available\" = \"0%\" }\n\n[control-plane]"),
            "{text}"
        );
        assert!(!is_complete(&text[..text.len() / 2]) && !is_complete(""));
    }

    #[test]
    fn a_node_gets_no_settings_from_the_environment() {
        let command = program(["CORACLE_STATE_DIR", "PATH"].into_iter().map(std::ffi::OsString::from));
        assert_eq!(command.get_envs().count(), 1);
        let (name, value) = command.get_envs().next().expect("one");
        assert!(name == "CORACLE_STATE_DIR" && value.is_none());
    }

    #[test]
    fn a_resolver_configuration_with_only_loopback_servers_is_not_used() {
        let files = |first: &str, second: &str| [("a", first.to_owned()), ("b", second.to_owned())];
        let (stub, real) = ("nameserver 127.0.0.53\n", "# x\nnameserver 192.0.2.1\n");
        assert_eq!(resolver(&files(real, "")), "a");
        assert_eq!(resolver(&files(stub, real)), "b");
        assert_eq!(resolver(&files(stub, "")), "", "none");
        assert_eq!(resolver(&files("nameserver ::1\nnameserver 2001:db8::1", real)), "a");
    }
}
