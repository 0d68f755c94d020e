//! One machine of several: a network and a mount namespace of its own, on a bridge with the others.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use crate::eventually;
use crate::machine::run;

/// The bridge of the test's own namespace that all hosts hang on, and its addresses there.
pub(crate) const BRIDGE: &str = "fabric0";
pub(crate) const GATEWAY: &str = "192.0.2.1";
pub(crate) const GATEWAY_V6: &str = "2001:db8:1::1";

/// Which addresses machines have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Families {
    /// IPv4 and IPv6.
    Both,
    /// IPv6 alone.
    V6,
}

/// A machine that ends with this value, if nothing else holds its namespaces.
pub struct Host {
    /// Holds the namespaces, and ends when its standard input does: also when the test was killed.
    holder: Child,
    number: u8,
    families: Families,
}

/// Makes the bridge in the namespace of the calling thread.
pub(crate) fn make_bridge(families: Families) {
    run("ip", &["link", "add", BRIDGE, "type", "bridge"]);
    if families == Families::Both {
        run("ip", &["addr", "add", &format!("{GATEWAY}/24"), "dev", BRIDGE]);
    }
    run("ip", &["addr", "add", &format!("{GATEWAY_V6}/64"), "dev", BRIDGE, "nodad"]);
    run("ip", &["link", "set", BRIDGE, "up"]);
}

/// Runs `work` on a thread of its own in the network namespace of a process.
///
/// # Panics
/// When the process is gone, or `work` panics.
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

// === impl Host ===

impl Host {
    /// Makes the machine with the addresses `192.0.2.<number>` and `2001:db8:1::<number>` (hexadecimal) on `eth0`.
    /// To be called in the namespace with the bridge.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    pub fn new(number: u8) -> Self {
        Self::with(Families::Both, number)
    }

    /// The same with the addresses of some families.
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

    /// Gives `eth0` the addresses of a number, and takes away those that it had.
    pub fn set_address(&self, number: u8) {
        self.run("ip", &["addr", "flush", "dev", "eth0", "scope", "global"]);
        if self.families == Families::Both {
            self.run("ip", &["addr", "add", &format!("192.0.2.{number}/24"), "dev", "eth0"]);
        }
        self.run("ip", &["addr", "add", &format!("2001:db8:1::{number:x}/64"), "dev", "eth0", "nodad"]);
    }

    /// The first address that it had, of IPv4 if it has any.
    #[must_use]
    pub fn address(&self) -> String {
        match self.families {
            Families::Both => format!("192.0.2.{}", self.number),
            Families::V6 => self.address_v6(),
        }
    }

    /// The first IPv6 address that it had.
    #[must_use]
    pub fn address_v6(&self) -> String {
        format!("2001:db8:1::{:x}", self.number)
    }

    /// The bridge's port that leads to it.
    #[must_use]
    pub fn port(&self) -> String {
        format!("port{}", self.number)
    }

    /// A process in its namespaces.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// A program there, to be given arguments. It is the process itself that starts.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        let namespaces = PathBuf::from(format!("/proc/{}/ns", self.pid()));
        command.arg(format!("--net={}", namespaces.join("net").display()));
        command.arg(format!("--mount={}", namespaces.join("mnt").display()));
        command.arg("--").arg(program);
        command
    }

    /// Runs a program there to its end; its output.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?} on host {}: {errors}", self.number);
        String::from_utf8(output.stdout).unwrap()
    }

    /// What `ip -d -j` says there.
    #[must_use]
    pub fn ip(&self, arguments: &[&str]) -> Value {
        let mut all = vec!["-d", "-j"];
        all.extend(arguments);
        serde_json::from_str(&self.run("ip", &all)).unwrap()
    }

    /// What a program says there in JSON; none when it fails, as of an interface that is being made.
    #[must_use]
    pub fn try_json(&self, program: &str, arguments: &[&str]) -> Option<Value> {
        let output = self.command(program).args(arguments).output().unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    /// Takes it off the bridge.
    pub fn cut(&self) {
        run("ip", &["link", "set", &self.port(), "down"]);
    }

    /// Puts it back.
    pub fn join(&self) {
        run("ip", &["link", "set", &self.port(), "up"]);
    }

    /// Lets only frames with so many bytes behind the Ethernet header through between it and the bridge; its own
    /// interface does not know of that.
    pub fn narrow(&self, mtu: u32) {
        run("ip", &["link", "set", &self.port(), "mtu", &mtu.to_string()]);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.holder.kill().ok();
        self.holder.wait().ok();
        // The pair goes with the namespace at the kernel's leisure; the next host may have the same number.
        std::process::Command::new("ip").args(["link", "del", &self.port()]).output().ok();
    }
}
