//! Threads in network namespaces, a command that changes these, and the configuration of a network.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};

use coracle_cni::NetworkConfig;
use nix::sched::{CloneFlags, unshare};

/// A thread in a network namespace that executes jobs. The namespace ends with the thread.
pub(crate) struct NamespaceThread {
    pub(crate) netns: PathBuf,
    jobs: Sender<Box<dyn FnOnce() + Send>>,
}

impl NamespaceThread {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = channel();
        let (jobs, todo) = channel::<Box<dyn FnOnce() + Send>>();
        std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let (own, tid) = (std::process::id(), nix::unistd::gettid());
            sender.send(PathBuf::from(format!("/proc/{own}/task/{tid}/ns/net"))).unwrap();
            todo.into_iter().for_each(|job| job());
        });
        Self { netns: receiver.recv().unwrap(), jobs }
    }

    /// Runs a job in the namespace and returns its result. Threads that it starts stay there.
    pub(crate) fn within<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = channel();
        self.jobs.send(Box::new(move || drop(sender.send(job())))).unwrap();
        receiver.recv().unwrap()
    }
}

/// Runs `ip` in the namespace of the calling thread.
pub(crate) fn ip(line: &str) -> String {
    let output = Command::new("ip").args(line.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The configuration of a network without lists and plugins of others, with its directories below `dir`.
pub(crate) fn network_config(dir: &Path, bridge: &str) -> NetworkConfig {
    NetworkConfig {
        conf_dir: None,
        bin_dirs: Vec::new(),
        state_dir: dir.to_owned(),
        root_dir: dir.join("root"),
        bridge: bridge.to_owned(),
        table: "coracle".to_owned(),
        mtu: None,
        served: Vec::new(),
        check_sources: true,
    }
}
