//! `coracle runtime` on a test's machine, driven with the published crictl.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use crate::{Machine, eventually};

/// What `coracle runtime` runs, and how to talk to it.
pub struct Cri {
    process: Option<Child>,
    places: [String; 2],
    cgroup: String,
    config: PathBuf,
    log: PathBuf,
}

impl Cri {
    /// `coracle runtime` on this machine, with its network ready.
    ///
    /// # Panics
    /// When it does not become so within 20 s.
    #[must_use]
    pub fn runtime(machine: &Machine, mirrors: &Path) -> Self {
        Self::runtime_with(machine, mirrors, &["--cni-conf-dir", ""])
    }

    /// As [`runtime`](Self::runtime), with more flags, also of where network configurations are.
    ///
    /// # Panics
    /// When it does not become ready within 20 s.
    #[must_use]
    pub fn runtime_with(machine: &Machine, mirrors: &Path, flags: &[&str]) -> Self {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let [state, run] = ["state", "run"].map(|name| text(machine.path(name)));
        let socket = format!("unix://{run}/cri.sock");
        let config = machine.path("crictl.yaml");
        // Two seconds, when not told otherwise.
        let patience = "timeout: 120\n";
        let text = format!("runtime-endpoint: {socket}\nimage-endpoint: {socket}\n{patience}");
        fs::write(&config, text).unwrap();
        let (log, cgroup) = (machine.path("runtime.log"), machine.name().to_owned());
        let out = fs::File::create(&log).unwrap();
        let process = Command::new(Machine::coracle())
            .args(["runtime", "--listen", &socket, "--root", &state, "--state", &run])
            .args(["--cgroup-root", &format!("/{cgroup}")])
            .arg("--registry-config-dir")
            .arg(mirrors)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        let cri = Self { process: Some(process), places: [state, run], cgroup, config, log };
        eventually("the runtime", 20, || cri.try_crictl(&["version"]).status.success().then_some(()));
        cri
    }

    /// The runtime's process.
    ///
    /// # Panics
    /// After [`down`](Self::down).
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// The published crictl, to be given arguments.
    ///
    /// # Panics
    /// When it is not built.
    #[must_use]
    pub fn command(&self) -> Command {
        let crictl = Machine::tool("crictl", "scripts/critest tools");
        let mut command = Command::new(crictl);
        command.arg("--config").arg(&self.config);
        command
    }

    /// Runs crictl, which must succeed; its standard output without the last line's end.
    ///
    /// # Panics
    /// When it fails.
    pub fn crictl(&self, arguments: &[&str]) -> String {
        let output = self.try_crictl(arguments);
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "crictl {arguments:?}: {}", said(&output.stderr));
        said(&output.stdout).trim_end().to_owned()
    }

    /// Runs crictl, whatever comes of it.
    #[must_use]
    pub fn try_crictl(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs crictl with something on its standard input; its standard output.
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

    /// What crictl says in JSON.
    #[must_use]
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.crictl(arguments)).unwrap()
    }

    /// Ends the runtime and removes every pod of it, all images and records.
    ///
    /// # Panics
    /// When something stays.
    pub fn down(mut self) {
        let output = self.end();
        assert!(output.status.success(), "coracle down: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn end(&mut self) -> Output {
        let [state, run] = &self.places;
        let output = Command::new(Machine::coracle())
            .args(["down", "--purge", "--state-dir", state, "--run-dir", run])
            .args(["--cgroup-root", &format!("/{}", self.cgroup)])
            .output()
            .unwrap();
        if let Some(mut process) = self.process.take() {
            process.kill().ok();
            process.wait().unwrap();
        }
        output
    }
}

impl Drop for Cri {
    fn drop(&mut self) {
        if self.process.is_none() {
            return;
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            eprintln!("--- the end of the runtime's log:");
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
        }
        let down = self.end();
        if !down.status.success() {
            eprintln!("coracle down: {}", String::from_utf8_lossy(&down.stderr));
        }
    }
}
