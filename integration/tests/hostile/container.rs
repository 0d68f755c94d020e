//! Attacks by root of a container on exec, on probes, and on the files that the node reads for the container.

#[path = "container/cgroups.rs"]
mod cgroups;
#[cfg(target_arch = "x86_64")]
#[path = "container/criu.rs"]
mod criu;
#[path = "container/device.rs"]
mod device;
#[path = "container/exec.rs"]
mod exec;
#[path = "container/files.rs"]
mod files;
#[cfg(target_arch = "x86_64")]
#[path = "container/one_call.rs"]
mod one_call;
#[path = "container/program.rs"]
mod program;
#[cfg(target_arch = "x86_64")]
#[path = "container/seccomp.rs"]
mod seccomp;

use std::fs;
use std::process::Output;

use coracle_integration::{Cri, Machine, on_a_machine};
use serde_json::{Value, json};

const BUSYBOX: &str = "docker.io/library/busybox:latest";

/// Time limit of an exec in seconds, for slow machines. Usually it takes a fraction of a second.
const EXEC_TIMEOUT: &str = "120";

/// Mode of the pod's pid namespace, with the CRI's numbers.
#[derive(Clone, Copy)]
enum Pids {
    Pod = 0,
    Container = 1,
    Node = 2,
}

/// A pod with one container in which the attacker is root.
struct Attacker<'a> {
    machine: &'a Machine,
    cri: &'a Cri,
    pod: String,
    id: String,
}

/// Runs a test with a runtime that has pulled the image.
fn on_a_runtime(test: impl FnOnce(&Machine, &Cri) + Send + 'static) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cri = Cri::runtime(machine, &mirrors);
        cri.crictl(&["pull", BUSYBOX]);
        test(machine, &cri);
        cri.down();
    });
}

fn on_an_attacker(pids: Pids, test: impl FnOnce(&Attacker<'_>) + Send + 'static) {
    on_a_runtime(move |machine, cri| test(&Attacker::new(machine, cri, pids, |_| {})));
}

impl<'a> Attacker<'a> {
    fn new(machine: &'a Machine, cri: &'a Cri, pids: Pids, change: impl FnOnce(&mut Value)) -> Self {
        let pod = cri.crictl(&["runp", &write(machine, "pod", &pod_config(machine, pids))]);
        let mut attacker = Self { machine, cri, pod, id: String::new() };
        let mut config = container_config(pids);
        change(&mut config);
        attacker.id = attacker.create(&config, pids);
        cri.crictl(&["start", &attacker.id]);
        attacker
    }

    /// Process id of a container's first process.
    fn pid(&self, id: &str) -> u64 {
        self.cri.json(&["inspect", id])["info"]["pid"].as_u64().unwrap()
    }

    /// Creates another container of the pod. Returns its id.
    fn create(&self, config: &Value, pids: Pids) -> String {
        let output = self.try_create(config, pids);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn try_create(&self, config: &Value, pids: Pids) -> Output {
        let config = write(self.machine, "container", config);
        let pod = write(self.machine, "pod", &pod_config(self.machine, pids));
        self.cri.try_crictl(&["create", &self.pod, &config, &pod])
    }

    /// Runs a script in the container without standard input, as a probe does. Returns its output.
    fn sh(&self, script: &str) -> String {
        let output = self.try_sh(script, EXEC_TIMEOUT);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {errors}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn try_sh(&self, script: &str, seconds: &str) -> Output {
        self.cri.try_crictl(&["exec", "-s", "--timeout", seconds, &self.id, "sh", "-c", script])
    }
}

fn pod_config(machine: &Machine, pids: Pids) -> Value {
    json!({
        "metadata": { "name": "attacker", "namespace": "default", "uid": "1" },
        "log_directory": machine.path("logs"),
        "linux": { "security_context": { "namespace_options": { "pid": pids as u8 } } },
    })
}

fn container_config(pids: Pids) -> Value {
    json!({
        "metadata": { "name": "attacker" },
        "image": { "image": BUSYBOX },
        "command": ["sleep", "100000"],
        "log_path": "attacker.log",
        "linux": { "security_context": { "namespace_options": { "pid": pids as u8 } } },
    })
}

fn write(machine: &Machine, name: &str, config: &Value) -> String {
    let path = machine.path(&format!("{name}.json"));
    fs::write(&path, config.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}
