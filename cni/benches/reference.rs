//! ADD and DEL of a pod with one host port: our plugins in process and as executables, beside the reference's
//! (Debian's containernetworking-plugins), in turn and in one run. As root: `cargo bench -p coracle-cni`.
//!
//! The executables are this program under their names: plugins and nothing else.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a bench prints, and panics like a test"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use coracle_cni::{Attachment, Network, NetworkConfig, PluginKind, plugin_main};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

const ROUNDS: usize = 40;

/// A process in a network namespace of its own, which stands for a sandbox.
struct Sandbox(Child);

impl Sandbox {
    fn new() -> Self {
        let child =
            Command::new("unshare").args(["--net", "sleep", "1000"]).stdin(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(30));
        Self(child)
    }

    fn netns(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn list(bridge: &str, subnet: &str, dir: &Path) -> Value {
    let places = json!({"table": bridge, "stateDir": dir.join("plugins")});
    json!({"cniVersion": "1.0.0", "name": bridge, "plugins": [
        {"type": "bridge", "bridge": bridge, "isGateway": true, "ipMasq": true, "hairpinMode": true,
         "coracle": places, "ipam": {"type": "host-local", "dataDir": dir.join("addresses"),
         "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]}},
        {"type": "portmap", "capabilities": {"portMappings": true}, "coracle": places}]})
}

fn call(dir: &Path, command: &str, (id, netns): (&str, &Path), conf: &Value) -> Value {
    let mut child = Command::new(dir.join(conf["type"].as_str().unwrap()))
        .envs([("CNI_COMMAND", command), ("CNI_CONTAINERID", id), ("CNI_IFNAME", "eth0")])
        .env("CNI_NETNS", netns)
        .env("CNI_PATH", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// One pod by executables: how long its ADD took, and its DEL.
fn by_executables(dir: &Path, list: &Value, (id, netns): (&str, &Path), port: u16) -> [Duration; 2] {
    let ports = json!({"portMappings": [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]});
    let conf = |index: usize, previous: Option<&Value>| {
        let mut conf = list["plugins"][index].clone();
        for key in ["cniVersion", "name"] {
            conf[key] = list[key].clone();
        }
        if index == 1 {
            conf["runtimeConfig"] = ports.clone();
        }
        if let Some(previous) = previous {
            conf["prevResult"] = previous.clone();
        }
        conf
    };
    let start = Instant::now();
    let result = call(dir, "ADD", (id, netns), &conf(0, None));
    let result = call(dir, "ADD", (id, netns), &conf(1, Some(&result)));
    let added = start.elapsed();
    let start = Instant::now();
    call(dir, "DEL", (id, netns), &conf(1, Some(&result)));
    call(dir, "DEL", (id, netns), &conf(0, Some(&result)));
    [added, start.elapsed()]
}

/// One pod in process. Its end is what the runtime calls when the namespace ends.
async fn in_process(network: &Network, (id, netns): (&str, &Path), port: u16) -> [Duration; 2] {
    let ports = json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]);
    let at = Attachment {
        id: id.to_owned(),
        netns: netns.to_owned(),
        ifname: "eth0".to_owned(),
        ports: serde_json::from_value(ports).unwrap(),
        ..Attachment::default()
    };
    let start = Instant::now();
    network.add(&at).await.unwrap();
    let added = start.elapsed();
    let start = Instant::now();
    network.release(id).await.unwrap();
    [added, start.elapsed()]
}

fn median(samples: &[[Duration; 2]], of: impl Fn(&[Duration; 2]) -> Duration) -> f64 {
    let mut all: Vec<_> = samples.iter().map(of).collect();
    all.sort();
    all[all.len() / 2].as_secs_f64() * 1000.0
}

fn print(samples: &[Vec<[Duration; 2]>; 3]) {
    println!(
        "| p50 of {ROUNDS}, ms | in process | executables | reference | ratios |\n|---|---|---|---|---|"
    );
    let both: fn(&[Duration; 2]) -> Duration = |both| both[0] + both[1];
    for (what, of) in [
        ("ADD", (|both| both[0]) as fn(&[Duration; 2]) -> Duration),
        ("DEL", |both| both[1]),
        ("ADD + DEL", both),
    ] {
        let [inside, outside, theirs] = samples.each_ref().map(|samples| median(samples, of));
        let ratios = [theirs / inside, theirs / outside].map(|ratio| format!("{ratio:.1}")).join(" / ");
        println!("| {what} | {inside:.2} | {outside:.2} | {theirs:.2} | {ratios} |");
    }
}

fn main() -> ExitCode {
    let program = PathBuf::from(std::env::args_os().next().unwrap());
    if let Some(kind) = program.file_name().and_then(|name| PluginKind::parse(name.to_str()?)) {
        return plugin_main(kind);
    }
    unshare(CloneFlags::CLONE_NEWNET).expect("this needs root");
    let dir = tempfile::tempdir_in("/run").unwrap();
    let (ours, reference) = (dir.path().join("bin"), PathBuf::from("/usr/lib/cni"));
    std::fs::create_dir_all(&ours).unwrap();
    for kind in PluginKind::ALL {
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), ours.join(kind.name())).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let conf = dir.path().join("conf");
    std::fs::create_dir_all(&conf).unwrap();
    std::fs::write(conf.join("10.conflist"), list("bench0", "10.91.0.0/16", dir.path()).to_string()).unwrap();
    let config = NetworkConfig {
        conf_dir: Some(conf),
        bin_dirs: Vec::new(),
        state_dir: dir.path().join("state"),
        root_dir: dir.path().join("root"),
        bridge: "bench9".into(),
        table: "bench".into(),
        mtu: None,
    };
    let network = runtime.block_on(Network::open(config)).unwrap();
    let lists = [list("bench1", "10.92.0.0/16", dir.path()), list("bench2", "10.93.0.0/16", dir.path())];
    // A pod that stays, as there is on a node: what a first pod makes for all is not what is measured.
    let stays = [Sandbox::new(), Sandbox::new(), Sandbox::new()];
    let at = |netns: PathBuf| Attachment {
        id: "stays".into(),
        netns,
        ifname: "eth0".into(),
        ..Attachment::default()
    };
    runtime.block_on(network.add(&at(stays[0].netns()))).unwrap();
    for (dir, list, sandbox) in [(&ours, &lists[0], &stays[1]), (&reference, &lists[1], &stays[2])] {
        let mut conf = list["plugins"][0].clone();
        conf["cniVersion"] = list["cniVersion"].clone();
        conf["name"] = list["name"].clone();
        call(dir, "ADD", ("stays", &sandbox.netns()), &conf);
    }
    let mut samples: [Vec<[Duration; 2]>; 3] = Default::default();
    for round in 0..ROUNDS {
        let sandboxes = [Sandbox::new(), Sandbox::new(), Sandbox::new()];
        let netns = sandboxes.each_ref().map(Sandbox::netns);
        let (id, port) = (format!("pod{round}"), 8000 + u16::try_from(round).unwrap());
        samples[0].push(runtime.block_on(in_process(&network, (&id, &netns[0]), port)));
        samples[1].push(by_executables(&ours, &lists[0], (&id, &netns[1]), port + 1000));
        samples[2].push(by_executables(&reference, &lists[1], (&id, &netns[2]), port + 2000));
    }
    print(&samples);
    ExitCode::SUCCESS
}
