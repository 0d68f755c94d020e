//! Many concurrent streams, and slow clients.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use futures::future::join_all;
use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tonic::Request;

use crate::client::{Streams, exchange};
use crate::fixture::{Machine, constant};
use crate::spdy::Spdy;

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(120);
/// Number of bytes that each client sends: more than the capacity of a pipe.
const PAYLOAD_SIZE: usize = 100_000;
/// Longer than the runtime waits for output after a command's end.
const LATE: Duration = Duration::from_secs(8);

/// Number of clients: 100, or 25 on a slow emulated machine, where `EXECS` is set.
fn many() -> u32 {
    if std::env::var_os("EXECS").is_some() { 25 } else { 100 }
}

/// Descriptors and threads of a process.
#[derive(Clone, Copy, Debug)]
struct ProcessResources {
    descriptors: usize,
    threads: usize,
}

impl ProcessResources {
    fn of(pid: i32) -> Self {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).expect("process").count();
        Self { descriptors: count("fd"), threads: count("task") }
    }
}

/// Descriptors and threads of an idle process, after all previous connections are closed.
async fn at_rest(pid: i32) -> ProcessResources {
    constant(|| ProcessResources::of(pid).descriptors).await;
    ProcessResources::of(pid)
}

/// Waits until the numbers of descriptors and of threads are as before. Threads for blocking work do not count.
async fn nothing_stays(before: [ProcessResources; 2], pids: [i32; 2]) {
    for (before, pid) in before.into_iter().zip(pids) {
        eventually_async("descriptors are closed", 20, async || {
            ProcessResources::of(pid).descriptors <= before.descriptors
        })
        .await;
        assert!(ProcessResources::of(pid).threads <= before.threads + 20, "{:?}", ProcessResources::of(pid));
    }
}

/// The bytes that client `number` sends; different for each client.
fn payload(number: u32) -> Vec<u8> {
    format!("{number},").into_bytes().into_iter().cycle().take(PAYLOAD_SIZE).collect()
}

async fn exec(
    machine: &Machine,
    streams: &Streams,
    id: &str,
    command: &[&str],
) -> WebSocketStream<TcpStream> {
    let request = cri::ExecRequest {
        container_id: id.to_owned(),
        cmd: command.iter().map(|word| (*word).to_owned()).collect(),
        stdin: true,
        stdout: true,
        ..Default::default()
    };
    let url = machine.runtime.exec(Request::new(request)).await.expect("exec").into_inner().url;
    streams.connect(&url, "v5.channel.k8s.io").await
}

pub(crate) async fn a_message_of_many_megabytes_reaches_the_command(machine: &mut Machine) {
    let pod = machine.pod("long-message").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let streams = Streams::open(machine).await;
    let client = exec(machine, &streams, &id, &["wc", "-c"]).await;
    // Channel 0, then zeros. Then the end of standard input.
    let message = vec![0; (20 << 20) + 1];
    let output = timeout(LONG, exchange(client, &[&message, b"\xff\x00"])).await.expect("in time");
    assert_eq!(output[1].trim(), (message.len() - 1).to_string());
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_hundred_concurrent_commands_do_not_mix_their_streams(machine: &mut Machine) {
    let pod = machine.pod("many-commands").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let streams = Streams::open(machine).await;
    let pids = [nix::unistd::getpid().as_raw(), machine.shim_pid(&pod).await];
    let before = [at_rest(pids[0]).await, at_rest(pids[1]).await];
    let mut clients = Vec::new();
    for number in 0..many() {
        let mut client = exec(machine, &streams, &id, &["cat"]).await;
        client.send(Message::Binary(Bytes::from_static(b"\0x"))).await.expect("send");
        let echo = timeout(LONG, client.next()).await.expect("in time").expect("open").expect("message");
        assert_eq!(echo.into_data(), b"\x01x".as_slice());
        clients.push((number, client));
    }
    let [runtime, shim] = pids.map(ProcessResources::of);
    println!("  {before:?} {runtime:?} {shim:?}");
    // This process has both ends of a client's connection and three descriptors of the command. The shim keeps none.
    assert!(runtime.descriptors <= before[0].descriptors + 6 * clients.len() + 20, "{runtime:?}");
    assert!(runtime.threads <= before[0].threads + 20, "{runtime:?}");
    assert!(shim.descriptors <= before[1].descriptors + 20 && shim.threads == 1, "{shim:?}");
    // All clients send at the same time.
    let heard = join_all(clients.into_iter().map(async |(number, client)| {
        let stdin = [b"\0", &payload(number)[..]].concat();
        let heard = timeout(LONG, exchange(client, &[&stdin, b"\xff\0"])).await.expect("the command ends");
        assert!(heard[1].as_bytes() == payload(number), "client {number} received {} bytes", heard[1].len());
        assert!(heard[3].contains("Success"), "{}", heard[3]);
    }));
    heard.await;
    nothing_stays(before, pids).await;
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_hundred_concurrent_forwards_do_not_mix_their_streams(machine: &mut Machine) {
    let pod = machine.pod("many-forwards").await;
    let id = machine.run(&pod, "c", &["nc", "-ll", "-p", "8080", "-e", "cat"]).await;
    let look = ["grep", ":1F90 ", "/proc/net/tcp", "/proc/net/tcp6"];
    eventually_async("the server listens", 20, async || {
        machine.exec(&id, &look, 0).await.expect("exec").exit_code == 0
    })
    .await;
    let streams = Streams::open(machine).await;
    let pids = [nix::unistd::getpid().as_raw(), machine.shim_pid(&pod).await];
    let before = [at_rest(pids[0]).await, at_rest(pids[1]).await];
    let mut clients = Vec::new();
    for number in 0..many() {
        let request = cri::PortForwardRequest { pod_sandbox_id: pod.clone(), port: vec![8080] };
        let url =
            machine.runtime.port_forward(Request::new(request)).await.expect("forward").into_inner().url;
        let mut client = Spdy::connect(&streams, &url, "portforward.k8s.io").await;
        let data = client.open_port(1, 8080).await;
        client.write(data, b"x", false).await;
        assert_eq!(timeout(LONG, client.read(data, 1)).await.expect("in time"), b"x");
        clients.push((number, client, data));
    }
    let [runtime, shim] = pids.map(ProcessResources::of);
    println!("  {before:?} {runtime:?} {shim:?}");
    // This process has both ends of a client's connection and one descriptor in the pod.
    assert!(runtime.descriptors <= before[0].descriptors + 3 * clients.len() + 20, "{runtime:?}");
    assert!(runtime.threads <= before[0].threads + 20, "{runtime:?}");
    assert!(shim.descriptors <= before[1].descriptors + 20 && shim.threads == 1, "{shim:?}");
    let heard = join_all(clients.into_iter().map(async |(number, mut client, data)| {
        // Sent in parts, without waiting for the client to read.
        for part in payload(number).chunks(10_000) {
            client.write(data, part, false).await;
            let heard = timeout(LONG, client.read(data, part.len())).await.expect("in time");
            assert!(heard == part, "client {number} received {} bytes", heard.len());
        }
        client.write(data, b"", true).await;
        let rest = timeout(LONG, client.read_to_end(data)).await.expect("it ends");
        assert!(rest.is_empty(), "{number}: {rest:?}");
    }));
    heard.await;
    nothing_stays(before, pids).await;
    machine.remove_pod(&pod).await;
}

/// Writes numbered lines until its output blocks, then ends. A late reader gets all lines.
const WRITES_MORE_THAN_IS_READ: &str = r#"
    line=$(head -c 1000 /dev/zero | tr '\0' x)
    (i=0; while :; do echo "$i $line"; i=$((i+1)); echo $i >/tmp/count; done) &
    writer=$!
    old=
    while now=$(cat /tmp/count 2>/dev/null); [ -z "$now" ] || [ "$now" != "$old" ]; do old=$now; sleep 1; done
    kill -9 $writer
    touch /tmp/over"#;

/// A client that reads its output with long pauses, like a pager.
pub(crate) async fn a_slow_client_gets_the_complete_output(machine: &mut Machine) {
    let pod = machine.pod("reads-late").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let streams = Streams::open(machine).await;
    let client = exec(machine, &streams, &id, &["sh", "-c", WRITES_MORE_THAN_IS_READ]).await;
    eventually_async("the command ends", 20, async || {
        machine.exec(&id, &["test", "-e", "/tmp/over"], 0).await.expect("exec").exit_code == 0
    })
    .await;
    let count = machine.exec(&id, &["cat", "/tmp/count"], 0).await.expect("exec").stdout;
    let count: usize = String::from_utf8_lossy(&count).trim().parse().expect("a number");
    sleep(LATE).await;
    let heard = timeout(LONG, exchange(client, &[])).await.expect("it ends");
    let numbers: Vec<&str> = heard[1].lines().filter_map(|line| line.split(' ').next()).collect();
    // The last line may have been written but not counted.
    assert!((count..=count + 1).contains(&numbers.len()), "{} lines of {count}", numbers.len());
    assert!(numbers.iter().enumerate().all(|(at, number)| *number == at.to_string()), "in order");
    assert!(heard[3].contains("Success"), "{}", heard[3]);
    machine.remove_pod(&pod).await;
}

/// The container continues to write, and its log is complete.
pub(crate) async fn a_client_that_does_not_read_does_not_block_the_container(machine: &mut Machine) {
    const LINES: usize = 100_000;
    let pod = machine.pod("never-reads").await;
    let script = format!(
        "while [ ! -e /tmp/go ]; do usleep 20000; done; yes {} | head -n {LINES}; touch /tmp/done; sleep 1000",
        "x".repeat(99)
    );
    let id = machine.run(&pod, "c", &["sh", "-c", &script]).await;
    let streams = Streams::open(machine).await;
    let pids = [nix::unistd::getpid().as_raw(), machine.shim_pid(&pod).await];
    let before = [at_rest(pids[0]).await, at_rest(pids[1]).await];
    let attach = cri::AttachRequest { container_id: id.clone(), stdout: true, ..Default::default() };
    let url = machine.runtime.attach(Request::new(attach)).await.expect("attach").into_inner().url;
    let client = streams.connect(&url, "v5.channel.k8s.io").await;
    eventually_async("the shim has the client's connection", 20, async || {
        ProcessResources::of(pids[1]).descriptors > before[1].descriptors
    })
    .await;
    machine.exec(&id, &["touch", "/tmp/go"], 0).await.expect("exec");
    eventually_async("the container writes all", 20, async || {
        machine.exec(&id, &["test", "-e", "/tmp/done"], 0).await.expect("exec").exit_code == 0
    })
    .await;
    let log = machine.status(&id).await.log_path;
    let text = "x".repeat(99);
    eventually_async("the log has all", 20, async || logged(&log).get(&text).copied() == Some(LINES)).await;
    // A late reader gets the beginning of the output, and then the error that it was too slow.
    let heard = timeout(LONG, exchange(client, &[])).await.expect("it ends");
    let whole = heard[1].lines().filter(|line| *line == text).count();
    assert!(whole > 0 && whole < LINES, "{whole}");
    assert!(heard[3].contains("too slowly"), "{}", heard[3]);
    nothing_stays(before, pids).await;
    machine.remove_pod(&pod).await;
}

/// Occurrences of each line in a log and its rotated files. Every line is complete, except the last one of a killed
/// container.
fn logged(path: &str) -> BTreeMap<String, usize> {
    let (mut texts, mut partial) = (BTreeMap::new(), 0);
    for file in log_files(path) {
        // The oldest file may be removed at any moment.
        for line in std::fs::read_to_string(file).unwrap_or_default().lines() {
            match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
                [_, "stdout", "F", text] => *texts.entry(text.to_owned()).or_insert(0) += 1,
                [_, "stdout", "P", _] if partial == 0 => partial += 1,
                _ => panic!("{line:?}"),
            }
        }
    }
    texts
}

fn log_files(path: &str) -> Vec<std::path::PathBuf> {
    let dir = std::path::Path::new(path).parent().expect("directory");
    std::fs::read_dir(dir).expect("logs").flatten().map(|entry| entry.path()).collect()
}

/// A number of `/proc/<pid>/<file>` after a name.
fn proc_number(pid: i32, file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("process");
    let line = text.lines().find(|line| line.starts_with(name)).expect("a line");
    line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number")
}

pub(crate) async fn a_container_that_never_stops_writing_needs_no_runtime(machine: &mut Machine) {
    const SIZE: u64 = 1 << 20;
    machine.close_runtime().await;
    machine.open_runtime_with(|config| (config.log_max_size, config.log_max_files) = (SIZE, 3)).await;
    let pod = machine.pod("never-stops").await;
    let id = machine.run(&pod, "c", &["yes", "0123456789"]).await;
    let (shim, log) = (machine.shim_pid(&pod).await, machine.status(&id).await.log_path);
    machine.close_runtime().await;
    let written = || proc_number(shim, "io", "wchar:");
    // The first files make allocations that are kept.
    eventually_async("the container writes", 20, async || written() > 10 * SIZE).await;
    let (first, memory) = (written(), proc_number(shim, "status", "VmRSS:"));
    eventually_async("the container continues to write", 20, async || written() > first + 40 * SIZE).await;
    let now = proc_number(shim, "status", "VmRSS:");
    println!("  {memory} kB, {now} kB after {} MB", (written() - first) >> 20);
    assert!(now <= memory + 1024, "{memory} and {now} kB");
    let sizes: Vec<u64> = log_files(&log).iter().flat_map(|file| file.metadata()).map(|m| m.len()).collect();
    // There is one additional file while the oldest file is removed.
    assert!((1..=4).contains(&sizes.len()) && sizes.iter().all(|size| *size <= SIZE), "{sizes:?}");
    let files = || log_files(&log).into_iter().filter_map(|file| std::fs::read_to_string(file).ok());
    for line in files().flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()) {
        // The last line may be incomplete while it is written.
        let text = line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned();
        assert!("0123456789".starts_with(&text) && (text.len() == 10 || line.len() < 60), "{line:?}");
    }
    machine.open_runtime().await;
    assert_eq!(machine.exec(&id, &["true"], 60).await.expect("exec").exit_code, 0);
    machine.stop(&id, 0).await;
    assert_eq!(machine.status(&id).await.exit_code, 137);
    // Written lines are complete.
    let texts = logged(&log);
    assert!(texts["0123456789"] > 1000 && texts.len() == 1, "{:?}", texts.keys().collect::<Vec<_>>());
    machine.remove_pod(&pod).await;
}
