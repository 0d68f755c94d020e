//! The published kubectl, connected to one cluster.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use crate::{Machine, eventually};

/// Runs kubectl with one kubeconfig.
pub struct Kubectl {
    kubeconfig: PathBuf,
}

// === impl Kubectl ===

impl Kubectl {
    /// Creates a client for a kubeconfig. The file may be created later.
    #[must_use]
    pub fn new(kubeconfig: PathBuf) -> Self {
        Self { kubeconfig }
    }

    /// Whether the kubeconfig exists. Without it, kubectl fails.
    #[must_use]
    pub fn has_kubeconfig(&self) -> bool {
        self.kubeconfig.exists()
    }

    /// Runs kubectl and returns its standard output.
    ///
    /// # Panics
    /// When it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.try_kubectl(arguments);
        assert!(
            output.status.success(),
            "kubectl {arguments:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs kubectl 1.37, which may fail.
    #[must_use]
    pub fn try_kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_of("1.37", arguments, "")
    }

    /// Runs kubectl of a minor version with `input` as its standard input. It may fail.
    #[must_use]
    pub fn kubectl_of(&self, version: &str, arguments: &[&str], input: &str) -> Output {
        use std::io::Write;
        let mut command = self.command(Machine::kubectl(version));
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).ok();
        child.wait_with_output().unwrap()
    }

    /// A command with the environment of kubectl: configuration, and a home directory for its cache.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("KUBECONFIG", &self.kubeconfig).env("HOME", self.kubeconfig.parent().unwrap());
        // With less garbage collection, one run of kubectl takes more memory, but 36 instead of 45 ms of processor time.
        command.env("GOGC", "400");
        command
    }

    /// Starts kubectl in the background. Its standard output is a pipe; errors go to the test's output.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(Machine::kubectl("1.37"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Starts kubectl in the background and writes its standard output and standard error to a file.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start_with_log(&self, arguments: &[&str], log: &Path) -> Child {
        let log = File::create(log).unwrap();
        let mut command = self.command(Machine::kubectl("1.37"));
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        command.spawn().unwrap()
    }

    /// Runs kubectl in a new terminal. A shell splits the arguments into words. Standard output is that of the terminal.
    ///
    /// # Panics
    /// When `script` cannot be started.
    #[must_use]
    pub fn in_a_terminal(&self, arguments: &[&str]) -> Output {
        let words = format!("{} {}", Machine::kubectl("1.37").display(), arguments.join(" "));
        let mut command = self.command("script");
        command.args(["-qec", &words, "/dev/null"]).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs `kubectl apply -f -`.
    ///
    /// # Panics
    /// When it fails.
    pub fn apply(&self, manifest: &str) {
        let output = self.kubectl_of("1.37", &["apply", "-f", "-"], manifest);
        assert!(output.status.success(), "apply: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Runs `kubectl get … -o json` and parses the output.
    #[must_use]
    pub fn get(&self, arguments: &[&str]) -> Value {
        let mut all = vec!["get", "-o", "json"];
        all.extend(arguments);
        serde_json::from_str(&self.kubectl(&all)).unwrap()
    }

    /// Polls a pod until `look` returns a value. `what` describes the value for the message of a timeout.
    ///
    /// # Panics
    /// When `look` returns no value in time.
    pub fn until_pod<T>(&self, name: &str, what: &str, look: impl Fn(&Value) -> Option<T>) -> T {
        eventually(&format!("{name}: {what}"), 120, || look(&self.get(&["pod", name])))
    }

    /// The Ready pods without deletionTimestamp. `selection` has further arguments of `kubectl get pods`.
    #[must_use]
    pub fn ready_pods(&self, selection: &[&str]) -> Vec<Value> {
        let list = self.get(&[&["pods"][..], selection].concat());
        let is_ready = |pod: &&Value| {
            pod["metadata"]["deletionTimestamp"].is_null() && has_condition(pod, "Ready", "True")
        };
        list["items"].as_array().unwrap().iter().filter(is_ready).cloned().collect()
    }
}

/// Whether an object has a condition of this type with this status.
#[must_use]
pub fn has_condition(object: &Value, type_: &str, status: &str) -> bool {
    let mut conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == type_ && condition["status"] == status)
}
