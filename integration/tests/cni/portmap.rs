//! Conditions of host ports and source addresses of connections through them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use coracle_integration::{inside, on_a_machine};
use coracle_testing::run;
use serde_json::{Value, json};

use crate::plugins::{Plugins, Sandbox};
use crate::working;

/// The machine's addresses on its uplink and on the bridge.
const UPLINK: &str = "198.51.100.10:8080";
const BRIDGE: &str = "10.1.2.1:8080";

/// portmap's configuration for one port, with the result of the bridge plugin.
fn ported(result: &Value, protocol: &str, fields: &Value) -> Value {
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": protocol}]);
    let mut conf = json!({"cniVersion": "1.0.0", "name": "net", "type": "portmap", "prevResult": result,
        "runtimeConfig": {"portMappings": ports}});
    conf.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    conf
}

/// Listens on port 80 of the sandbox until the test ends.
fn serve(sandbox: &Sandbox) {
    let listener = inside(sandbox.pid(), || TcpListener::bind("0.0.0.0:80")).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            stream.write_all(b"served").ok();
        }
    });
}

fn is_served(address: &str) -> bool {
    let address: SocketAddr = address.parse().unwrap();
    let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(30)) else { return false };
    let mut text = String::new();
    stream.read_to_string(&mut text).is_ok() && text == "served"
}

#[test]
fn a_port_with_conditions_accepts_only_matching_packets() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let (server, client) = (Sandbox::new(), Sandbox::new());
        let mut conf = plugins.with_settings(working(machine));
        conf["isDefaultGateway"] = json!(true);
        let result = plugins.plugin("bridge").call("ADD", "c1", &server, &conf).unwrap();
        plugins.plugin("bridge").call("ADD", "c2", &client, &conf).unwrap();
        serve(&server);
        // Connections from the machine to its uplink, from the machine to the bridge, and from another sandbox to the
        // bridge.
        for (conditions, open) in [
            (json!([]), [true, true, true]),
            (json!(["!", "-d", "198.51.100.0/24"]), [false, true, true]),
            (json!(["ip saddr 10.1.2.0/24"]), [false, true, true]),
            (json!(["ip", "saddr", "!=", "10.1.2.0/24"]), [true, false, false]),
            (json!(["-i", "br0"]), [false, false, true]),
            (json!(["iifname != br*"]), [true, true, false]),
            (json!(["-i", "br+", "-s", "10.1.2.99"]), [false, false, false]),
        ] {
            let fields =
                json!({"conditionsV4": conditions, "conditionsV6": ["! -d fc00::/7"], "markMasqBit": 7});
            let conf = plugins.with_settings(ported(&result, "tcp", &fields));
            plugins.plugin("portmap").call("ADD", "c1", &server, &conf).unwrap();
            plugins.plugin("portmap").call("CHECK", "c1", &server, &conf).unwrap();
            let found = [is_served(UPLINK), is_served(BRIDGE), inside(client.pid(), || is_served(BRIDGE))];
            assert_eq!(found, open, "{conditions}: {}", run("nft", &["list", "ruleset"]));
            plugins.plugin("portmap").call("DEL", "c1", &server, &conf).unwrap();
            assert!(!is_served(UPLINK) && !run("nft", &["list", "ruleset"]).contains("8080"));
        }
    });
}

#[test]
fn check_detects_an_empty_table_and_add_restores_it() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let server = Sandbox::new();
        let mut conf = plugins.with_settings(working(machine));
        conf["isDefaultGateway"] = json!(true);
        let result = plugins.plugin("bridge").call("ADD", "c1", &server, &conf).unwrap();
        serve(&server);
        let conf = plugins.with_settings(ported(&result, "tcp", &json!({})));
        plugins.plugin("portmap").call("ADD", "c1", &server, &conf).unwrap();
        assert!(is_served(UPLINK));
        run("nft", &["flush", "table", "inet", "cni-test"]);
        let error = plugins.plugin("portmap").call("CHECK", "c1", &server, &conf).unwrap_err();
        assert_eq!(error["code"], 101, "{error}");
        plugins.plugin("portmap").call("ADD", "c1", &server, &conf).unwrap();
        assert!(is_served(UPLINK));
        plugins.plugin("portmap").call("CHECK", "c1", &server, &conf).unwrap();
        plugins.plugin("portmap").call("DEL", "c1", &server, &conf).unwrap();
    });
}

#[test]
fn without_snat_the_source_address_stays() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let (server, client) = (Sandbox::new(), Sandbox::new());
        let conf = plugins.with_settings(working(machine));
        let result = plugins.plugin("bridge").call("ADD", "c1", &server, &conf).unwrap();
        let other = plugins.plugin("bridge").call("ADD", "c2", &client, &conf).unwrap();
        let socket = inside(server.pid(), || UdpSocket::bind("0.0.0.0:80")).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let sender = || {
            inside(client.pid(), || UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"who", BRIDGE).unwrap());
            let mut buffer = [0; 8];
            socket.recv_from(&mut buffer).unwrap().1.ip().to_string()
        };
        // A port of another sandbox, which has its own rules.
        let neighbour = plugins.with_settings(ported(&other, "tcp", &json!({"snat": true})));
        plugins.plugin("portmap").call("ADD", "c2", &client, &neighbour).unwrap();
        for (snat, source) in [(true, "10.1.2.1"), (false, "10.1.2.3"), (true, "10.1.2.1")] {
            let conf = plugins.with_settings(ported(&result, "udp", &json!({"snat": snat})));
            plugins.plugin("portmap").call("ADD", "c1", &server, &conf).unwrap();
            assert_eq!(sender(), source, "snat {snat}: {}", run("nft", &["list", "ruleset"]));
            plugins.plugin("portmap").call("DEL", "c1", &server, &conf).unwrap();
        }
    });
}
