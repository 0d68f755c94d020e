//! Helpers: run plugins as a runtime does, create sandboxes, and normalize results for comparison.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use coracle_integration::{Machine, eventually};
use coracle_testing::run;
use serde_json::{Value, json};

/// The plugins of one implementation.
pub(crate) struct Plugins {
    dir: PathBuf,
    /// State directory of our plugins, so that tests do not share state.
    settings: Option<Value>,
}

/// A plugin to run.
#[derive(Clone, Copy)]
pub(crate) struct Plugin<'a> {
    plugins: &'a Plugins,
    kind: &'a str,
    killed_after: Option<Duration>,
    armed: Option<&'a str>,
}

/// A process in a new network namespace, which represents a sandbox.
pub(crate) struct Sandbox(Option<Child>);

impl Plugins {
    /// `coracle`, installed below `dir`, or `reference`.
    pub(crate) fn of(implementation: &str, dir: &Path) -> Self {
        if implementation == "reference" {
            let dir = PathBuf::from("/usr/lib/cni");
            assert!(dir.join("bridge").exists(), "run scripts/packages containernetworking-plugins");
            return Self { dir, settings: None };
        }
        let bin = dir.join("bin");
        run(Machine::coracle().to_str().unwrap(), &["cni", "install", bin.to_str().unwrap()]);
        Self { dir: bin, settings: Some(json!({"table": "cni-test", "stateDir": dir.join("plugins")})) }
    }

    /// Adds the state directory and the nftables table of this test to a configuration.
    pub(crate) fn with_settings(&self, mut conf: Value) -> Value {
        if let Some(settings) = &self.settings {
            conf["coracle"] = settings.clone();
        }
        conf
    }

    /// Configurations of a network with several plugins: their types and fields.
    pub(crate) fn configurations<const N: usize>(&self, plugins: [(&str, Value); N]) -> Vec<Value> {
        let conf = |(kind, fields): (&str, Value)| {
            let mut conf = json!({"cniVersion": "1.1.0", "name": "net", "type": kind});
            conf.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            self.with_settings(conf)
        };
        plugins.map(conf).into()
    }

    /// The plugin of a type.
    pub(crate) fn plugin<'a>(&'a self, kind: &'a str) -> Plugin<'a> {
        Plugin { plugins: self, kind, killed_after: None, armed: None }
    }
}

impl<'a> Plugin<'a> {
    /// Kills the plugin after this time, if one is given.
    pub(crate) fn killed_after(self, time: Option<Duration>) -> Self {
        Self { killed_after: time, ..self }
    }

    /// Arms this fault point, if one is given. The plugin ends when it reaches the point.
    pub(crate) fn armed(self, point: Option<&'a str>) -> Self {
        Self { armed: point, ..self }
    }

    /// Runs the plugin for a command and a container id. Returns its result (null if empty) or its error object.
    pub(crate) fn call(
        &self,
        command: &str,
        id: &str,
        sandbox: &Sandbox,
        conf: &Value,
    ) -> Result<Value, Value> {
        self.run(command, id, sandbox, conf).unwrap()
    }

    /// Like [`call`](Self::call). None if the plugin was killed or reached the armed point.
    pub(crate) fn run(
        &self,
        command: &str,
        id: &str,
        sandbox: &Sandbox,
        conf: &Value,
    ) -> Option<Result<Value, Value>> {
        let mut child = self.start(command, id, sandbox, conf);
        if let Some(time) = self.killed_after {
            std::thread::sleep(time);
            child.kill().ok();
        }
        let output = child.wait_with_output().unwrap();
        output.status.code()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let answer = match output.stdout.trim_ascii() {
            b"" => Value::Null,
            text => serde_json::from_slice(text)
                .unwrap_or_else(|e| panic!("{} {command}: {e}: {errors}", self.kind)),
        };
        Some(if output.status.success() { Ok(answer) } else { Err(answer) })
    }

    fn start(&self, command: &str, id: &str, sandbox: &Sandbox, conf: &Value) -> Child {
        let mut child = Command::new(self.plugins.dir.join(self.kind))
            .env_clear()
            .envs([("PATH", std::env::var("PATH").unwrap()), ("CNI_COMMAND", command.to_owned())])
            .envs([("CNI_CONTAINERID", id), ("CNI_IFNAME", "eth0"), ("CNI_ARGS", "IgnoreUnknown=1;A=b")])
            .env("CNI_NETNS", sandbox.netns())
            .env("CNI_PATH", &self.plugins.dir)
            .envs(self.armed.map(|point| ("CORACLE_FAULT", point)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).ok();
        child
    }
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let mut child =
            Command::new("unshare").args(["--net", "sleep", "1000"]).stdin(Stdio::null()).spawn().unwrap();
        let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
        let path = format!("/proc/{}/ns/net", child.id());
        eventually("the sandbox's network namespace", 10, || {
            assert!(child.try_wait().unwrap().is_none(), "the process of the sandbox has ended");
            fs::read_link(&path).is_ok_and(|ns| ns != own)
        });
        Self(Some(child))
    }

    /// The value for commands without a network namespace.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    fn netns(&self) -> String {
        self.0.as_ref().map_or("/proc/self/ns/net".into(), |child| format!("/proc/{}/ns/net", child.id()))
    }

    /// A process in the sandbox.
    pub(crate) fn pid(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    /// Runs a program in the sandbox.
    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        let netns = format!("--net={}", self.netns());
        run("nsenter", &[&[netns.as_str()], arguments].concat())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// A result without values that implementations choose: hardware addresses, the name of the host's interface and the
/// order of equal entries.
pub(crate) fn normalized(result: &Value, sandbox: &Sandbox) -> Value {
    let mut result = result.clone();
    for interface in result["interfaces"].as_array_mut().unwrap() {
        let mac = interface["mac"].as_str().unwrap();
        assert_eq!(mac.len(), 17, "{mac}");
        interface["mac"] = json!("some");
        if interface["name"].as_str().unwrap().starts_with("veth") {
            interface["name"] = json!("veth");
        }
        if let Some(path) = interface.get("sandbox") {
            assert_eq!(*path, json!(sandbox.netns()));
            interface["sandbox"] = json!("sandbox");
        }
    }
    result
}

/// Sorted addresses and routes of `ip -j` output, without random and time-dependent values.
pub(crate) fn essence(listing: &Value) -> Value {
    let mut lines = Vec::new();
    for entry in listing.as_array().unwrap() {
        if entry.get("dst").is_some() {
            let [dst, gateway, dev, scope] = ["dst", "gateway", "dev", "scope"].map(|key| entry[key].clone());
            lines.push(json!([dst, gateway, dev, scope]).to_string());
        }
        for address in entry["addr_info"].as_array().into_iter().flatten().filter(|a| a["scope"] != "link") {
            lines.push(json!([address["local"], address["prefixlen"], address["scope"]]).to_string());
        }
        if entry.get("mtu").is_some() {
            lines.push(format!("mtu {}", entry["mtu"]));
        }
    }
    lines.sort();
    json!(lines)
}

/// Sorted VLANs of each port in `bridge -j vlan` output, without names.
pub(crate) fn vlans(listing: &Value) -> Value {
    let mut ports: Vec<String> =
        listing.as_array().unwrap().iter().map(|port| port["vlans"].to_string()).collect();
    ports.sort();
    json!(ports)
}

/// The names and contents of the files in a directory.
pub(crate) fn files(dir: &Path) -> Value {
    let mut files = serde_json::Map::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap();
        files.insert(name, json!(fs::read_to_string(entry.path()).unwrap()));
    }
    files.into()
}

/// Addresses allocated in a directory of host-local.
pub(crate) fn addresses(dir: &Path) -> Vec<String> {
    let files = files(dir);
    let names = files.as_object().unwrap().keys().filter(|name| name.parse::<std::net::IpAddr>().is_ok());
    names.cloned().collect()
}
