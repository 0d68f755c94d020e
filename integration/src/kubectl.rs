//! The real kubectl, led to one cluster.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::Machine;

/// Runs kubectl as the user of one kubeconfig.
pub struct Kubectl {
    kubeconfig: PathBuf,
}

// === impl Kubectl ===

impl Kubectl {
    pub(crate) fn new(kubeconfig: PathBuf) -> Self {
        Self { kubeconfig }
    }

    /// Runs kubectl; its standard output.
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

    /// Runs kubectl 1.37, whatever comes of it.
    #[must_use]
    pub fn try_kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_of("1.37", arguments, "")
    }

    /// Runs kubectl of a minor version with something on its standard input.
    #[must_use]
    pub fn kubectl_of(&self, version: &str, arguments: &[&str], input: &str) -> Output {
        use std::io::Write;
        let mut child = Command::new(Machine::kubectl(version))
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.kubeconfig.parent().unwrap())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).ok();
        child.wait_with_output().unwrap()
    }

    /// `kubectl apply -f -`, which must succeed.
    pub fn apply(&self, manifest: &str) {
        let output = self.kubectl_of("1.37", &["apply", "-f", "-"], manifest);
        assert!(output.status.success(), "apply: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// `kubectl get … -o json`.
    #[must_use]
    pub fn get(&self, arguments: &[&str]) -> Value {
        let mut all = vec!["get", "-o", "json"];
        all.extend(arguments);
        serde_json::from_str(&self.kubectl(&all)).unwrap()
    }
}
