//! A cluster on a test's machine: `coracle up` and kubectl.

use std::fs;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{Child, Command, Output};

use nix::sys::signal::Signal;

use crate::{Kubectl, Machine, eventually, on_a_machine, process};

/// Runs a test on a machine with a registry server and a running cluster.
///
/// # Panics
/// When the test panics, or the node is not Ready in time.
pub fn on_a_cluster(test: impl FnOnce(&mut Machine, &mut Cluster) + Send + 'static) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        test(machine, &mut cluster);
    });
}

/// A running `coracle up`. Dereferences to kubectl for this cluster.
pub struct Cluster {
    process: Option<Child>,
    flags: Vec<String>,
    /// Flags that name the state directory and the run directory.
    state_flags: Vec<String>,
    kubectl: Kubectl,
    log: PathBuf,
    cgroup: String,
}

impl Cluster {
    /// Starts `coracle up` on this machine and waits until the node is Ready.
    ///
    /// # Panics
    /// When the node is not Ready in time.
    #[must_use]
    pub fn up(machine: &Machine, mirrors: &std::path::Path) -> Self {
        // Disables image garbage collection by disk usage: the test machine may have little free disk space.
        Self::up_with(machine, mirrors, &["--image-gc-high-threshold", "100"])
    }

    /// Like [`up`](Self::up), with more flags. The caller must give the flags of image garbage collection, and may give
    /// eviction thresholds.
    ///
    /// # Panics
    /// When the node is not Ready in time, or the default service account does not exist.
    #[must_use]
    pub fn up_with(machine: &Machine, mirrors: &std::path::Path, flags: &[&str]) -> Self {
        let more = flags.iter().map(|flag| (*flag).to_owned());
        let has_thresholds = flags.contains(&"--eviction-hard");
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let state_flags = vec![
            "--state-dir".to_owned(),
            text(machine.path("state")),
            "--run-dir".to_owned(),
            text(machine.path("run")),
        ];
        let flags = [
            ("--pod-log-dir", text(machine.path("logs"))),
            ("--cgroup-root", format!("/{}", machine.name())),
            ("--registry-config-dir", text(mirrors.to_owned())),
            ("--node-name", "node-1".to_owned()),
            // The test machine may have little free disk space, and the default threshold would evict pods.
            ("--disk-free-percent", "1".to_owned()),
        ];
        let flags = flags.into_iter().filter(|(name, _)| !has_thresholds || *name != "--disk-free-percent");
        let mut cluster = Self {
            process: None,
            flags: flags.flat_map(|(k, v)| [k.to_owned(), v]).chain(more).collect(),
            state_flags,
            kubectl: Kubectl::new(machine.path("state/admin.kubeconfig")),
            log: machine.path("coracle.log"),
            cgroup: machine.name().to_owned(),
        };
        cluster.start();
        // Admission rejects pods without a service account.
        eventually("the default service account", 10, || {
            cluster.try_kubectl(&["get", "serviceaccount", "default"]).status.success()
        });
        cluster
    }

    /// Starts `coracle up` and waits until the node is Ready.
    ///
    /// # Panics
    /// When the node is not Ready in time.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "the process is already running");
        let mut command = Command::new(Machine::coracle());
        command.arg("up").args(&self.state_flags).args(&self.flags);
        self.process = Some(process::start(command, &self.log));
        eventually("the node to be Ready", 30, || {
            if let Some(status) = self.process.as_mut().unwrap().try_wait().unwrap() {
                panic!("coracle up ended: {status}");
            }
            // `kubectl wait` uses one watch, which takes less processor time than repeated reads. It fails at once
            // while no node exists.
            let wait = ["wait", "node", "--all", "--for=condition=Ready", "--timeout=5s"];
            self.kubectl.has_kubeconfig() && self.try_kubectl(&wait).status.success()
        });
    }

    /// Sends SIGTERM to `coracle up` and waits until it exits.
    pub fn stop(&mut self) {
        process::end(&mut self.process, Signal::SIGTERM);
    }

    /// Kills `coracle up` with SIGKILL.
    pub fn kill(&mut self) {
        process::end(&mut self.process, Signal::SIGKILL);
    }

    /// The process id of `coracle up`; 0 if it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// The current content of the log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Runs `coracle down`, which stops the cluster and removes every pod. The state directory stays.
    ///
    /// # Panics
    /// When it fails.
    pub fn down(&mut self) {
        let output = self.run_down(&[]);
        if let Some(mut process) = self.process.take() {
            process::wait_for_exit(&mut process);
        }
        assert!(output.status.success(), "coracle down: {}", String::from_utf8_lossy(&output.stderr));
        let summary = String::from_utf8_lossy(&output.stdout);
        assert!(summary.starts_with("removed the node with ") && summary.contains("--purge"), "{summary}");
    }

    fn run_down(&self, more: &[&str]) -> Output {
        self.down_command().args(more).output().unwrap()
    }

    /// `coracle down` with the flags of this cluster.
    #[must_use]
    pub fn down_command(&self) -> Command {
        let mut command = Command::new(Machine::coracle());
        command.arg("down").args(&self.state_flags).args(&self.flags);
        command
    }
}

impl Deref for Cluster {
    type Target = Kubectl;

    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            process::print_end("coracle up", &self.log);
        }
        self.stop();
        let down = self.run_down(&["--purge"]);
        if !down.status.success() {
            eprintln!("coracle down: {}", String::from_utf8_lossy(&down.stderr));
        }
        for hierarchy in fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
            fs::remove_dir(hierarchy.path().join(&self.cgroup)).ok();
        }
    }
}
