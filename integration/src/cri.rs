//! `coracle runtime` on a test's machine, and crictl.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use nix::sys::signal::Signal;

use crate::{Crictl, Machine, eventually, process};

/// A running `coracle runtime`. Dereferences to crictl for this runtime.
pub struct Cri {
    process: Option<Child>,
    arguments: Vec<String>,
    state_dirs: [String; 2],
    cgroup: String,
    crictl: Crictl,
    log: PathBuf,
}

impl Cri {
    /// Starts `coracle runtime` on this machine and waits until it responds.
    ///
    /// # Panics
    /// When it does not respond in time.
    #[must_use]
    pub fn runtime(machine: &Machine, mirrors: &Path) -> Self {
        Self::runtime_with(machine, mirrors, &["--cni-conf-dir", ""])
    }

    /// Like [`runtime`](Self::runtime), with more flags. They include `--cni-conf-dir`.
    ///
    /// # Panics
    /// When it does not respond in time.
    #[must_use]
    pub fn runtime_with(machine: &Machine, mirrors: &Path, flags: &[&str]) -> Self {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let [state, run] = ["state", "run"].map(|name| text(machine.path(name)));
        let socket = format!("unix://{run}/cri.sock");
        let (log, cgroup) = (machine.path("runtime.log"), machine.name().to_owned());
        let (group, mirrors) = (format!("/{cgroup}"), mirrors.to_str().unwrap());
        let own =
            ["runtime", "--listen", &socket, "--root", &state, "--state", &run, "--cgroup-root", &group];
        let arguments = [&own[..], &["--registry-config-dir", mirrors], flags].concat();
        let mut cri = Self {
            process: None,
            arguments: arguments.into_iter().map(str::to_owned).collect(),
            crictl: Crictl::new(&socket),
            state_dirs: [state, run],
            cgroup,
            log,
        };
        cri.start();
        cri
    }

    fn start(&mut self) {
        let mut command = Command::new(Machine::coracle());
        command.args(&self.arguments);
        self.process = Some(process::start(command, &self.log));
        eventually("the runtime", 20, || self.try_crictl(&["version"]).status.success());
    }

    /// Kills the runtime with SIGKILL, starts it again, and waits until it responds. Its containers continue to run.
    ///
    /// # Panics
    /// When it does not respond in time.
    pub fn restart(&mut self) {
        process::end(&mut self.process, Signal::SIGKILL);
        self.start();
    }

    /// The process id of the runtime.
    ///
    /// # Panics
    /// After [`down`](Self::down).
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Stops the runtime and removes its pods, images and records with `coracle down --purge`.
    ///
    /// # Panics
    /// When `coracle down` fails.
    pub fn down(mut self) {
        let output = self.end();
        assert!(output.status.success(), "coracle down: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn end(&mut self) -> Output {
        let [state, run] = &self.state_dirs;
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

impl Deref for Cri {
    type Target = Crictl;

    fn deref(&self) -> &Crictl {
        &self.crictl
    }
}

impl Drop for Cri {
    fn drop(&mut self) {
        if self.process.is_none() {
            return;
        }
        if std::thread::panicking() {
            process::print_end("coracle runtime", &self.log);
        }
        let down = self.end();
        if !down.status.success() {
            eprintln!("coracle down: {}", String::from_utf8_lossy(&down.stderr));
        }
    }
}
