//! Our own plugins as executables. The input is the environment and standard input. The output is a result or an error
//! object (section 2 of the specification).

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::firewall::Firewall;
use crate::host::Host;
use crate::invoke;
use crate::netns;
use crate::plugin;
use crate::plugin_executables::Executables;
use crate::plugin_kind::Kind;
use crate::spec::request::{Request, from_value};
use crate::spec::result::Answer;
use crate::spec::{Command, Version, is_identifier, is_interface_name};

/// Options under the key `coracle` of a plugin's configuration. They separate several networks of one machine.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct OwnOptions {
    /// The nftables table of the executables. The node has another table.
    table: String,
    /// Directory of claims. Like the table, it must be lost at a reboot.
    state_dir: PathBuf,
}

impl Default for OwnOptions {
    fn default() -> Self {
        Self { table: "coracle-cni".to_owned(), state_dir: "/run/cni/coracle".into() }
    }
}

/// Timeout of an IPAM plugin.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Main function of the plugin of this type.
#[must_use]
pub fn main(kind: Kind) -> ExitCode {
    let environment = |name: &str| std::env::var(name).unwrap_or_default();
    let mut input = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut input);
    let read = read.map(|_| ()).map_err(|source| Error::File {
        action: "read",
        path: "standard input".into(),
        source,
    });
    let outcome = read.and_then(|()| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|source| Error::Run { kind: kind.name().to_owned(), source })?;
        runtime.block_on(serve(kind, &environment, &input))
    });
    let (text, code) = match outcome {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(error) => (Some(refusal(&error, &input)), ExitCode::FAILURE),
    };
    if let Some(text) = text
        && std::io::stdout().write_all(text.to_string().as_bytes()).is_err()
    {
        return ExitCode::FAILURE;
    }
    code
}

/// Runs the command of the environment. Returns the output.
async fn serve(
    kind: Kind,
    environment: &dyn Fn(&str) -> String,
    input: &[u8],
) -> Result<Option<Value>, Error> {
    let command = command(environment)?;
    if command == Command::Version {
        return Ok(Some(invoke::supported()));
    }
    let mut request = request(command, environment, input)?;
    let version = request.version()?;
    let is_checked = kind != Kind::HostLocal && !may_be_own(environment);
    if is_checked && let Some(path) = request.netns.take_if(|path| netns::is_current(path)) {
        // The sandbox is gone. Its path now leads to the machine's own namespace, which must not be changed. Commands
        // that need no sandbox continue without the path.
        if matches!(command, Command::Add | Command::Check) {
            return Err(Error::OwnNamespace { path });
        }
    }
    let executables = Executables { path: request.path.clone(), timeout: TIMEOUT, leads_group: false };
    let options =
        request.conf.get("coracle").cloned().map(|options| from_value::<OwnOptions>(options, "coracle"));
    let options = options.transpose()?.unwrap_or_default();
    let firewall = Firewall::open(&options.table, &options.state_dir, true)?;
    let host = Host::in_own_namespace(firewall, None, None)?;
    let answer: Option<Answer> = plugin::run(&host, &executables, kind, &request)
        .await
        .map_err(|error| if command == Command::Status { error.of_status() } else { error })?;
    Ok(answer.map(|answer| answer.to_value(version)))
}

/// Whether the caller explicitly requests to work in the plugin's own namespace.
fn may_be_own(environment: &dyn Fn(&str) -> String) -> bool {
    let text = environment("CNI_NETNS_OVERRIDE");
    text == "1" || text.eq_ignore_ascii_case("true")
}

fn command(environment: &dyn Fn(&str) -> String) -> Result<Command, Error> {
    let text = environment("CNI_COMMAND");
    let wrong =
        || Error::Environment { variable: "CNI_COMMAND", reason: format!("{text:?} is not a command") };
    Command::ALL.into_iter().find(|command| command.name() == text).ok_or_else(wrong)
}

fn request(command: Command, environment: &dyn Fn(&str) -> String, input: &[u8]) -> Result<Request, Error> {
    let needed = |variable: &'static str, valid: fn(&str) -> bool| {
        let text = environment(variable);
        let wrong = || Error::Environment { variable, reason: format!("{text:?} is not a valid value") };
        let fits = valid(&text) || (text.is_empty() && !command.is_of_attachment());
        if fits { Ok(text) } else { Err(wrong()) }
    };
    let container_id = needed("CNI_CONTAINERID", is_identifier)?;
    let ifname = needed("CNI_IFNAME", is_interface_name)?;
    let netns = Some(PathBuf::from(environment("CNI_NETNS"))).filter(|path| !path.as_os_str().is_empty());
    if netns.is_none() && matches!(command, Command::Add | Command::Check) {
        return Err(Error::Environment { variable: "CNI_NETNS", reason: "is missing".to_owned() });
    }
    let path = environment("CNI_PATH");
    let path = path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect();
    let decode = |reason: String| Error::Decode { what: "the network configuration", reason };
    let conf: Map<String, Value> =
        serde_json::from_slice(input).map_err(|error| decode(error.to_string()))?;
    match conf.get("name").and_then(Value::as_str) {
        Some(name) if is_identifier(name) => {}
        _ => return Err(Error::invalid("name", "is not a valid network name")),
    }
    Ok(Request { command, container_id, netns, ifname, args: environment("CNI_ARGS"), path, conf })
}

/// The error object (section 5, "Error"), in the version of the request if it is known.
fn refusal(error: &Error, input: &[u8]) -> Value {
    let network_config = serde_json::from_slice::<Value>(input).ok();
    let version = network_config.as_ref().and_then(|conf| Version::parse(conf.get("cniVersion")?.as_str()?));
    let (message, chain) = (error.to_string(), error.chain());
    let details = chain.strip_prefix(&message).unwrap_or_default().trim_start_matches(": ").to_owned();
    json!({"cniVersion": version.unwrap_or(Version::NEWEST).name(), "code": error.code(), "msg": message,
        "details": details})
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};

    use super::*;

    fn environment_of<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> String + 'a {
        move |name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, v)| (*v).to_owned()).unwrap_or_default()
        }
    }

    const CONF: &[u8] = br#"{"cniVersion":"1.0.0","name":"n","type":"loopback"}"#;

    #[test]
    fn the_environment_is_checked() {
        let good =
            [("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "eth0"), ("CNI_NETNS", "/n"), ("CNI_PATH", "/a::/b")];
        let request = |changed: (&'static str, &'static str)| {
            let pairs: Vec<_> =
                good.iter().copied().map(|p| if p.0 == changed.0 { changed } else { p }).collect();
            super::request(Command::Add, &environment_of(&pairs), CONF)
        };
        assert_eq!(request(("", "")).unwrap().path, [PathBuf::from("/a"), "/b".into()]);
        for wrong in [
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "a/b"),
            ("CNI_IFNAME", "0123456789abcdef"),
            ("CNI_NETNS", ""),
        ] {
            assert_eq!(request(wrong).unwrap_err().code(), 4, "{wrong:?}");
        }
        assert!(
            super::request(Command::Del, &environment_of(&good[..2]), CONF).is_ok(),
            "DEL needs no namespace"
        );
        assert!(super::request(Command::Gc, &environment_of(&[]), CONF).is_ok(), "GC concerns no attachment");
        assert_eq!(super::request(Command::Gc, &environment_of(&[]), b"{").unwrap_err().code(), 6);
        assert_eq!(super::request(Command::Gc, &environment_of(&[]), b"{}").unwrap_err().code(), 7);
        assert_eq!(command(&environment_of(&[("CNI_COMMAND", "add")])).unwrap_err().code(), 4);
    }

    #[test]
    fn an_error_object_has_code_message_and_details() {
        let source = std::io::Error::other("deep");
        let object = refusal(&Error::Run { kind: "x".into(), source }, CONF);
        assert_eq!(
            object,
            json!({"cniVersion": "1.0.0", "code": 5, "msg": "cannot run plugin x", "details": "deep"})
        );
    }

    #[tokio::test]
    async fn a_full_range_makes_status_return_code_50_and_add_code_11() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("n")).unwrap();
        std::fs::write(dir.path().join("n/10.0.0.2"), "other\r\neth0").unwrap();
        let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "host-local",
            "ipam": {"type": "host-local", "dataDir": dir.path(), "subnet": "10.0.0.0/30"},
            "coracle": {"stateDir": dir.path()}});
        for (command, code) in [("STATUS", 50), ("ADD", 11)] {
            let pairs = [
                ("CNI_COMMAND", command),
                ("CNI_CONTAINERID", "c"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_NETNS", "/n"),
            ];
            let output = serve(Kind::HostLocal, &environment_of(&pairs), conf.to_string().as_bytes()).await;
            let error = output.unwrap_err();
            assert_eq!(error.code(), code, "{command}: {error}");
            assert!(error.to_string().contains("no address is free in 10.0.0.0/30"), "{error}");
        }
    }

    /// Runs a command for `eth0` in that namespace, on a thread whose own namespace has an `eth0` and a loopback that
    /// is up. Returns the error, and the interfaces afterwards.
    fn beside_own(kind: Kind, command: &str, netns: &str, more: &'static str) -> (Option<Error>, String) {
        let [command, netns] = [command, netns].map(str::to_owned);
        in_new_namespace_async(async move || {
            ip("link add eth0 type veth peer name far");
            ip("link set lo up");
            let dir = tempfile::tempdir().unwrap();
            let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": kind.name(),
                "coracle": {"stateDir": dir.path()}});
            let pairs = [
                ("CNI_COMMAND", command.as_str()),
                ("CNI_CONTAINERID", "c"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_NETNS", netns.as_str()),
                ("CNI_NETNS_OVERRIDE", more),
            ];
            let done = serve(kind, &environment_of(&pairs), conf.to_string().as_bytes()).await;
            (done.err(), ip("-br link"))
        })
    }

    #[test]
    fn the_machines_own_namespace_is_refused_as_a_sandbox() {
        let own = "/proc/thread-self/ns/net";
        for kind in [Kind::Loopback, Kind::Bridge] {
            let (error, links) = beside_own(kind, "DEL", own, "");
            assert!(error.is_none() && links.contains("eth0") && links.contains(",UP"), "{error:?} {links}");
            let (error, _) = beside_own(kind, "STATUS", own, "");
            assert!(error.is_none(), "{error:?}");
            for command in ["ADD", "CHECK"] {
                let (error, _) = beside_own(kind, command, own, "");
                assert_eq!(error.map(|error| error.code()), Some(8), "{command}");
            }
        }
        let (error, links) = beside_own(Kind::Bridge, "DEL", own, "1");
        assert!(error.is_none() && !links.contains("eth0"), "with the override: {error:?} {links}");
    }

    #[test]
    fn a_path_that_is_not_a_namespace_counts_as_absent() {
        for kind in [Kind::Loopback, Kind::Bridge, Kind::Tuning] {
            let (error, _) = beside_own(kind, "DEL", "/etc/hostname", "");
            assert!(error.is_none(), "{error:?}");
        }
        let (error, _) = beside_own(Kind::Loopback, "ADD", "/etc/hostname", "");
        assert_eq!(error.map(|error| error.code()), Some(3));
    }
}
