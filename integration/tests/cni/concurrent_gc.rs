//! GC of our plugins as executables, concurrent with DEL. The CNI specification forbids it, but it must leak nothing.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_integration::{Machine, on_a_machine};
use coracle_testing::run;
use serde_json::{Value, json};

use super::plugins::{Plugins, Sandbox, addresses, files};

/// State that a runtime keeps of an attachment.
struct Attachment {
    id: String,
    sandbox: Sandbox,
    result: Value,
}

/// A network with several plugins.
struct Chain {
    plugins: Plugins,
    confs: Vec<Value>,
}

// === impl Chain ===

impl Chain {
    fn of(machine: &Machine) -> Self {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let ranges = json!([[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd01::/64"}]]);
        let rates = json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000});
        let confs = [
            (
                "bridge",
                json!({"bridge": "br0", "isGateway": true, "ipMasq": true,
                    "ipam": {"type": "host-local", "dataDir": machine.path("addresses"), "ranges": ranges}}),
            ),
            ("tuning", json!({"dataDir": machine.path("tuning"), "mtu": 1400})),
            ("firewall", json!({"ingressPolicy": "same-bridge"})),
            ("portmap", json!({"snat": true})),
            ("bandwidth", rates),
        ];
        Self { confs: plugins.configurations(confs), plugins }
    }

    fn call(&self, command: &str, conf: &Value, id: &str, sandbox: &Sandbox) -> Value {
        let kind = conf["type"].as_str().unwrap();
        let answer = self.plugins.plugin(kind).call(command, id, sandbox, conf);
        answer.unwrap_or_else(|refusal| panic!("{kind} {command} {id}: {refusal}"))
    }

    /// The plugin configurations of an attachment with its own host ports.
    fn confs_for(&self, number: usize) -> Vec<Value> {
        let port =
            |port: usize, protocol| json!({"hostPort": port, "containerPort": 80, "protocol": protocol});
        let mut confs = self.confs.clone();
        confs[3]["runtimeConfig"] =
            json!({"portMappings": [port(8000 + number, "tcp"), port(9000 + number, "udp")]});
        confs
    }

    fn add(&self, number: usize) -> Attachment {
        let (id, sandbox, mut result) = (format!("c{number}"), Sandbox::new(), Value::Null);
        for mut conf in self.confs_for(number) {
            if !result.is_null() {
                conf["prevResult"] = result;
            }
            result = self.call("ADD", &conf, &id, &sandbox);
        }
        Attachment { id, sandbox, result }
    }

    /// CHECK in order, or DEL in reverse.
    fn call_each(&self, command: &str, number: usize, of: &Attachment) {
        let mut confs = self.confs_for(number);
        if command == "DEL" {
            confs.reverse();
        }
        for mut conf in confs {
            conf["prevResult"] = of.result.clone();
            self.call(command, &conf, &of.id, &of.sandbox);
        }
    }

    fn gc<'a>(&self, valid: impl Iterator<Item = &'a Attachment>) {
        let valid: Vec<Value> = valid.map(|one| json!({"containerID": one.id, "ifname": "eth0"})).collect();
        for conf in &self.confs {
            let mut conf = conf.clone();
            conf["cni.dev/valid-attachments"] = json!(valid);
            self.call("GC", &conf, "", &Sandbox::none());
        }
    }
}

/// Number of the interfaces of attachments on the host: veths and intermediate devices of the bandwidth plugin.
fn links() -> usize {
    let links = run("ip", &["-o", "link"]);
    links.lines().filter(|line| line.contains(": bwp") || line.contains(": veth")).count()
}

#[test]
fn a_concurrent_gc_does_not_disturb_del_or_other_attachments() {
    on_a_machine(|machine| {
        let chain = Chain::of(machine);
        let kept: Vec<Attachment> = (0..3).map(|number| chain.add(number)).collect();
        let before = (links(), files(&machine.path("plugins/firewall")));
        for round in 0..4 {
            let removed: Vec<(usize, Attachment)> =
                (10..18).map(|number| (number, chain.add(number))).collect();
            let deleting = AtomicBool::new(true);
            let (chain, deleting, removed, kept) = (&chain, &deleting, &removed, &kept);
            std::thread::scope(|scope| {
                let deletions = [&removed[..4], &removed[4..]].map(|half| {
                    scope.spawn(move || {
                        half.iter().for_each(|(number, one)| chain.call_each("DEL", *number, one));
                    })
                });
                // The runtime can list attachments that are being removed, or leave them out.
                let collecting = scope.spawn(move || {
                    let being_removed = || removed.iter().map(|(_, one)| one).filter(|_| round % 2 == 0);
                    let mut times = 0;
                    while deleting.load(Ordering::Relaxed) {
                        chain.gc(kept.iter().chain(being_removed()));
                        times += 1;
                    }
                    times
                });
                let ended = deletions.map(std::thread::ScopedJoinHandle::join);
                deleting.store(false, Ordering::Relaxed);
                assert!(collecting.join().unwrap() > 0);
                ended.into_iter().for_each(|result| result.unwrap());
            });
            for (number, one) in kept.iter().enumerate() {
                chain.call_each("CHECK", number, one);
            }
            let recorded: BTreeSet<String> = addresses(&machine.path("addresses/net")).into_iter().collect();
            let allocated = kept.iter().flat_map(|one| one.result["ips"].as_array().unwrap());
            let allocated: BTreeSet<String> = allocated
                .map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned())
                .collect();
            assert_eq!((recorded.len(), recorded), (6, allocated));
            assert_eq!((links(), files(&machine.path("plugins/firewall"))), before, "round {round}");
            let ruleset = run("nft", &["list", "ruleset"]);
            assert!((0..3).all(|number| ruleset.contains(&format!("{}", 8000 + number))), "{ruleset}");
            assert!(!ruleset.contains("8010") && !ruleset.contains("9017"), "{ruleset}");
        }
        for (number, one) in kept.iter().enumerate() {
            chain.call_each("DEL", number, one);
        }
        assert_eq!(run("nft", &["list", "ruleset"]), "");
        assert_eq!(links(), 0);
    });
}
