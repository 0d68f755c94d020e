//! Costs of an overlay with 1,000 peers: programming all peers, changing one peer, and idling. Runs as root in its own
//! network namespace: `cargo bench -p coracle-cni --bench overlay`.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench waits, panics and prints"
)]

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use coracle_cni::{Backend, End, Local, Overlay, OverlayConfig, Peer, PeerKind, merged};
use coracle_testing::{in_new_namespace_async, ip};

const PEERS: u16 = 1000;
const TIMES: usize = 20;

fn peer(number: u16, address: u16) -> (String, Peer) {
    let [high, low] = number.to_be_bytes();
    let [far, near] = address.to_be_bytes();
    let ends = vec![
        End { ip: Ipv4Addr::new(198, 18, far, near).into(), vtep: Some((1, [2, 0, 4, 0, high, low])) },
        End {
            ip: Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, address).into(),
            vtep: Some((1, [2, 0, 6, 0, high, low])),
        },
    ];
    let cidrs = vec![
        format!("10.{}.{low}.0/24", 100 + high).parse().unwrap(),
        format!("fd42:0:1:{number:x}::/64").parse().unwrap(),
    ];
    (format!("peer-{number}"), Peer { cidrs, kind: PeerKind::Vxlan, ends, bridged: false })
}

/// Voluntary context switches of this thread, which runs the overlay and the async runtime.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Processor time of this thread. Other load of the machine does not count.
fn used() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Wake-ups of the overlay in ten seconds without a change.
async fn idle(overlay: &mut Overlay) -> u64 {
    // Another thread signals the end, because tokio wakes several times for a distant timer.
    let (end, ended) = tokio::sync::oneshot::channel();
    let before = sleeps();
    let clock = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(10));
        end.send(()).unwrap();
    });
    tokio::select! {
        () = overlay.foreign_change() => panic!("a change was notified although there was none"),
        result = ended => result.unwrap(),
    }
    // One of the sleeps ends together with the measurement, so it is not counted.
    let woken = sleeps() - before - 1;
    clock.join().unwrap();
    woken
}

/// Creates the node's uplink.
fn create_uplink() {
    ip("link add eth0 type veth peer name eth1");
    ip("addr add 192.0.2.1/24 dev eth0");
    ip("addr add 2001:db8::1/64 dev eth0 nodad");
    ip("link set eth0 up");
    ip("link set eth1 up");
}

async fn bench() {
    create_uplink();
    let config = OverlayConfig {
        backend: Backend::Vxlan { vni: 1, port: 8472, direct_routing: false },
        interface: "bench.1".into(),
        identity: "bench".into(),
        mtu: None,
        udp_port: 8285,
        route_protocol: OverlayConfig::ROUTE_PROTOCOL,
    };
    let local = Local {
        cidrs: vec!["10.42.0.0/24".parse().unwrap(), "fd42::/64".parse().unwrap()],
        addresses: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
    };
    let none = BTreeMap::new();
    let mut peers: BTreeMap<String, Peer> = (1..=PEERS).map(|number| peer(number, number)).collect();
    let mut overlay = Overlay::open(config).unwrap();
    let [mut all, mut found, mut one, mut merge, mut working] = [const { Vec::new() }; 5];
    for round in 0..TIMES {
        overlay.remove().unwrap();
        let start = Instant::now();
        let applied = overlay.apply(&local, &peers, &none).unwrap();
        all.push(start.elapsed());
        assert!(applied.changes >= 6 * usize::from(PEERS));
        for step in 0..u16::try_from(TIMES).unwrap() {
            let number = 1 + step * 7;
            let address = 2000 + number + u16::try_from(round).unwrap() * 1000;
            peers.extend([peer(number, address)]);
            let (start, before) = (Instant::now(), used());
            assert_eq!(overlay.apply(&local, &peers, &none).unwrap().changes, 4);
            one.push(start.elapsed());
            working.push(used() - before);
        }
    }
    for _ in 0..TIMES {
        let ranges = peers.values().flat_map(|peer| peer.cidrs.iter().copied());
        let start = Instant::now();
        assert!(!merged(ranges).is_empty());
        merge.push(start.elapsed());
    }
    for _ in 0..TIMES {
        ip("route del 10.100.9.0/24");
        overlay.foreign_change().await;
        let start = Instant::now();
        assert_eq!(overlay.apply(&local, &peers, &none).unwrap().changes, 1);
        found.push(start.elapsed());
    }
    // Receives the notifications of the benchmark's own changes.
    drop(tokio::time::timeout(Duration::from_millis(200), overlay.foreign_change()).await);
    let woken = idle(&mut overlay).await;
    println!("programming {PEERS} peers of both families (p50): {:.1?}", median(all));
    let least = one.iter().min().copied().unwrap();
    println!("changing one peer (p50, minimum): {:.2?}, {least:.2?}", median(one));
    println!("processor time of that change, kernel included (p50): {:.2?}", median(working));
    println!("sorting the ranges of all peers (p50): {:.1?}", median(merge));
    println!("finding and repairing a foreign change (p50): {:.1?}", median(found));
    println!("wake-ups in 10 s without a change: {woken}");
}

fn main() {
    in_new_namespace_async(bench);
}
