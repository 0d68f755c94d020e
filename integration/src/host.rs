//! A simulated machine: a network namespace and a mount namespace. A bridge connects it with other hosts.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};

use coracle_testing::run;
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use crate::eventually;

/// The bridge in the test's namespace that connects all hosts, and its addresses.
pub(crate) const BRIDGE: &str = "fabric0";
pub(crate) const GATEWAY: &str = "192.0.2.1";
pub(crate) const GATEWAY_V6: &str = "2001:db8:1::1";

/// Address families of the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Families {
    /// Dual-stack.
    Both,
    /// IPv6 only.
    V6,
}

/// A simulated machine. Dropping it ends the process that keeps its namespaces alive.
pub struct Host {
    /// Keeps the namespaces alive. It exits when its standard input closes, so also when the test is killed.
    holder: Child,
    number: u8,
    families: Families,
}

/// Creates the bridge in the network namespace of the calling thread.
pub(crate) fn make_bridge(families: Families) {
    run("ip", &["link", "add", BRIDGE, "type", "bridge"]);
    if families == Families::Both {
        run("ip", &["addr", "add", &format!("{GATEWAY}/24"), "dev", BRIDGE]);
    }
    run("ip", &["addr", "add", &format!("{GATEWAY_V6}/64"), "dev", BRIDGE, "nodad"]);
    run("ip", &["link", "set", BRIDGE, "up"]);
}

/// Runs `work` on a new thread in the network namespace of a process.
///
/// # Panics
/// When the process has exited, or `work` panics.
pub fn inside<T: Send>(pid: u32, work: impl FnOnce() -> T + Send) -> T {
    let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net")).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(&namespace, CloneFlags::CLONE_NEWNET).unwrap();
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A command that runs a program in the network and mount namespaces of a process.
pub(crate) fn enter(pid: u32, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/proc/{pid}/ns/net")).arg(format!("--mount=/proc/{pid}/ns/mnt"));
    command.arg("--").arg(program);
    command
}

// === impl Host ===

impl Host {
    /// Creates a host with the addresses `192.0.2.<number>` and `2001:db8:1::<number>` (hexadecimal) on `eth0`.
    /// The calling thread must be in the network namespace with the bridge.
    ///
    /// # Panics
    /// When the host cannot be created.
    #[must_use]
    pub fn new(number: u8) -> Self {
        Self::with(Families::Both, number)
    }

    /// Like [`new`](Self::new), with addresses of the given families.
    pub(crate) fn with(families: Families, number: u8) -> Self {
        let holder = Command::new("unshare")
            .args(["--net", "--mount", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let host = Self { holder, number, families };
        let own = std::fs::read_link("/proc/thread-self/ns/mnt").unwrap();
        eventually("the host's namespaces", 10, || {
            let of_host = std::fs::read_link(format!("/proc/{}/ns/mnt", host.pid())).ok()?;
            (of_host != own).then_some(())
        });
        let (port, pid) = (host.port(), host.pid().to_string());
        run("ip", &["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &pid]);
        run("ip", &["link", "set", &port, "master", BRIDGE, "up"]);
        host.run("ip", &["link", "set", "lo", "up"]);
        host.set_address(number);
        host.run("ip", &["link", "set", "eth0", "up"]);
        host
    }

    /// Replaces the addresses of `eth0` with the addresses of host `number`.
    pub fn set_address(&self, number: u8) {
        self.run("ip", &["addr", "flush", "dev", "eth0", "scope", "global"]);
        if self.families == Families::Both {
            self.run("ip", &["addr", "add", &format!("192.0.2.{number}/24"), "dev", "eth0"]);
        }
        self.run("ip", &["addr", "add", &format!("2001:db8:1::{number:x}/64"), "dev", "eth0", "nodad"]);
    }

    /// The initial address: IPv4 if the host has IPv4, otherwise IPv6.
    #[must_use]
    pub fn address(&self) -> String {
        match self.families {
            Families::Both => format!("192.0.2.{}", self.number),
            Families::V6 => self.address_v6(),
        }
    }

    /// The initial IPv6 address.
    #[must_use]
    pub fn address_v6(&self) -> String {
        format!("2001:db8:1::{:x}", self.number)
    }

    /// The interface of this host on the bridge's side.
    #[must_use]
    pub fn port(&self) -> String {
        format!("port{}", self.number)
    }

    /// A process in the namespaces of this host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// A command that runs a program on this host; the caller adds arguments. The child process is the program itself.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        enter(self.pid(), program)
    }

    /// Runs a program on this host and returns its standard output.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?} on host {}: {errors}", self.number);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Output of `ip -d -j` on this host.
    #[must_use]
    pub fn ip(&self, arguments: &[&str]) -> Value {
        let mut all = vec!["-d", "-j"];
        all.extend(arguments);
        serde_json::from_str(&self.run("ip", &all)).unwrap()
    }

    /// Runs a program on this host and parses its JSON output. `None` if it fails, for example if an interface does not exist.
    #[must_use]
    pub fn try_json(&self, program: &str, arguments: &[&str]) -> Option<Value> {
        let output = self.command(program).args(arguments).output().unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    /// Disconnects the host from the bridge.
    pub fn disconnect(&self) {
        run("ip", &["link", "set", &self.port(), "down"]);
    }

    /// Connects the host to the bridge again.
    pub fn reconnect(&self) {
        run("ip", &["link", "set", &self.port(), "up"]);
    }

    /// Sets the MTU of the bridge's side of the link. The host's own interface keeps its MTU, so longer packets are
    /// lost without an event.
    pub fn set_link_mtu(&self, mtu: u32) {
        run("ip", &["link", "set", &self.port(), "mtu", &mtu.to_string()]);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.holder.kill().ok();
        self.holder.wait().ok();
        // The kernel removes the veth pair some time after the namespace. The next host may need the same name.
        std::process::Command::new("ip").args(["link", "del", &self.port()]).output().ok();
    }
}
