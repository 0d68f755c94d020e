//! The published crictl, connected to one runtime.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::host::enter;
use crate::{Host, Machine};

/// Runs crictl against the socket of one runtime.
pub struct Crictl {
    endpoint: String,
    /// A process in the namespaces where crictl runs. None means the namespaces of the calling thread.
    namespaces_of: Option<u32>,
}

// === impl Crictl ===

impl Crictl {
    /// Creates a client of the runtime that listens at `endpoint`, such as `unix:///run/cri.sock`.
    #[must_use]
    pub fn new(endpoint: &str) -> Self {
        Self { endpoint: endpoint.to_owned(), namespaces_of: None }
    }

    /// Creates a client of a runtime on another host.
    #[must_use]
    pub fn on(host: &Host, endpoint: &str) -> Self {
        Self { namespaces_of: Some(host.pid()), ..Self::new(endpoint) }
    }

    /// A command that runs crictl; the caller adds arguments.
    ///
    /// # Panics
    /// When crictl is not built.
    #[must_use]
    pub fn command(&self) -> Command {
        let program = Machine::tool("crictl", "scripts/critest tools");
        let mut command = match self.namespaces_of {
            Some(pid) => enter(pid, program),
            None => Command::new(program),
        };
        // crictl gets an empty configuration file, because it would warn about a missing one. Its default timeout is
        // two seconds.
        command.args(["--config", "/dev/null"]);
        command.args(["--timeout", "120s"]);
        command.args(["--runtime-endpoint", &self.endpoint, "--image-endpoint", &self.endpoint]);
        command
    }

    /// Runs crictl and returns its standard output without trailing white space.
    ///
    /// # Panics
    /// When it fails.
    pub fn crictl(&self, arguments: &[&str]) -> String {
        let output = self.try_crictl(arguments);
        assert!(output.status.success(), "crictl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// Runs crictl, which may fail.
    #[must_use]
    pub fn try_crictl(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs crictl with `input` as its standard input and returns its standard output.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn crictl_with(&self, arguments: &[&str], input: &str) -> String {
        let mut command = self.command();
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "crictl {arguments:?}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs crictl and parses its standard output as JSON.
    #[must_use]
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.crictl(arguments)).unwrap()
    }
}
