//! Streams whose clients end slowly or disconnect.

use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::Message;
use tonic::Request;

use crate::client::Streams;
use crate::fixture::{Machine, constant};
use crate::spdy::Spdy;

/// A pod where each connection to a port is served by a script.
async fn serving(machine: &Machine, name: &str, script: &str) -> String {
    let pod = machine.pod(name).await;
    let id = machine.run(&pod, "c", &["nc", "-ll", "-p", "8080", "-e", "sh", "-c", script]).await;
    let look = ["grep", ":1F90 ", "/proc/net/tcp", "/proc/net/tcp6"];
    let listens = async || machine.exec(&id, &look, 0).await.expect("exec").exit_code == 0;
    eventually_async("the server listens", 20, listens).await;
    pod
}

async fn forward(machine: &Machine, streams: &Streams, pod: &str) -> Spdy {
    let request = cri::PortForwardRequest { pod_sandbox_id: pod.to_owned(), port: vec![8080] };
    let url = machine.runtime.port_forward(Request::new(request)).await.expect("forward").into_inner().url;
    Spdy::connect(streams, &url, "portforward.k8s.io").await
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

pub(crate) async fn a_long_head_of_a_request_is_refused(machine: &mut Machine) {
    let streams = Streams::open(machine).await;
    let mut client = TcpStream::connect(&streams.address).await.expect("connect");
    let mut head = "GET /exec/unknown HTTP/1.1\r\nHost: a\r\nA: ".to_owned();
    head.push_str(&"x".repeat((32 << 10) - head.len()));
    client.write_all(head.as_bytes()).await.expect("sent");
    let mut status = [0; 12];
    client.read_exact(&mut status).await.expect("an answer before the end of the head");
    assert_eq!(&status, b"HTTP/1.1 431");
}

pub(crate) async fn a_half_closed_stream_still_delivers_the_pods_answer(machine: &mut Machine) {
    let script = "x=$(cat); sleep 1; echo \"heard $x\"";
    let pod = serving(machine, "half", script).await;
    let streams = Streams::open(machine).await;
    let mut client = forward(machine, &streams, &pod).await;
    // Two concurrent connections, each with its own answer.
    let first = client.open_port(1, 8080).await;
    let second = client.open_port(5, 8080).await;
    client.write(first, b"one", true).await;
    client.write(second, b"tw", false).await;
    client.write(second, b"o", true).await;
    let answer = timeout(Duration::from_secs(120), client.read_to_end(first)).await.expect("an answer");
    assert_eq!(String::from_utf8_lossy(&answer), "heard one\n");
    let third = client.open_port(9, 8080).await;
    client.write(third, b"three", true).await;
    let answer = timeout(Duration::from_secs(120), client.read_to_end(third)).await.expect("an answer");
    assert_eq!(String::from_utf8_lossy(&answer), "heard three\n");
    drop(client);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_disconnected_client_leaves_no_connection(machine: &mut Machine) {
    // A server that neither reads, writes nor closes.
    let pod = serving(machine, "deaf-server", "exec sleep 999").await;
    let streams = Streams::open(machine).await;
    let before = constant(descriptors).await;
    let mut client = forward(machine, &streams, &pod).await;
    for id in 0..10 {
        let data = client.open_port(1 + 4 * id, 8080).await;
        client.write(data, b"hello", false).await;
    }
    let all = "descriptors of ten connections, each with both ends here";
    eventually_async(all, 20, async || descriptors() >= before + 12).await;
    drop(client);
    eventually_async("the descriptors are closed", 10, async || descriptors() <= before).await;
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_client_that_is_gone_is_noticed_while_its_command_does_not_read(machine: &mut Machine) {
    let pod = machine.pod("deaf-command").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let streams = Streams::open(machine).await;
    let before = constant(descriptors).await;
    let request = cri::ExecRequest {
        container_id: id,
        cmd: vec!["sleep".into(), "999".into()],
        stdin: true,
        stdout: true,
        ..Default::default()
    };
    let url = machine.runtime.exec(Request::new(request)).await.expect("exec").into_inner().url;
    let mut client = streams.connect(&url, "v5.channel.k8s.io").await;
    // The command's pipe and the queue hold 144 KiB. The rest fits into the receive buffer of the socket, so that the end of
    // the connection arrives behind it.
    client.send(Message::Binary(vec![0; 150 << 10].into())).await.expect("send");
    drop(client);
    eventually_async("the descriptors are closed", 20, async || descriptors() <= before).await;
    machine.remove_pod(&pod).await;
}

pub(crate) async fn an_idle_stream_is_closed(machine: &mut Machine) {
    let pod = serving(machine, "idle", "exec sleep 999").await;
    let id = machine.run(&pod, "shell", &["sleep", "1000"]).await;
    machine.close_runtime().await;
    // Connections are closed at the limit. A busy machine closes them later.
    let (limit, most) = (Duration::from_secs(10), Duration::from_secs(180));
    machine.open_runtime_with(|config| config.stream_idle_limit = Some(limit)).await;
    let streams = Streams::open(machine).await;
    let before = constant(descriptors).await;
    let request = cri::ExecRequest {
        container_id: id.clone(),
        cmd: vec!["cat".into()],
        stdin: true,
        stdout: true,
        ..Default::default()
    };
    let url = machine.runtime.exec(Request::new(request)).await.expect("exec").into_inner().url;
    let mut shell = streams.connect(&url, "v5.channel.k8s.io").await;
    let mut ports = forward(machine, &streams, &pod).await;
    let port = ports.open_port(1, 8080).await;
    // An active client keeps its stream, while the silent one's is closed.
    let silent = tokio::spawn(async move { ports.read_to_end(port).await });
    let active = async {
        while !silent.is_finished() {
            sleep(limit / 20).await;
            shell.send(Message::Binary(b"\x00x".as_slice().into())).await.expect("the request is served");
            let echo = timeout(limit, shell.next()).await.expect("in time").expect("open").expect("message");
            assert_eq!(echo.into_data(), b"\x01x".as_slice());
        }
    };
    timeout(most, active).await.expect("the connection of the silent client is closed");
    // Unit tests with a paused clock check the limit itself.
    let closed = async { while let Some(Ok(_)) = shell.next().await {} };
    timeout(most, closed).await.expect("the stream is closed when it has no more traffic");
    drop(shell);
    // No descriptor is kept: the command's input is closed, and so the command ends.
    eventually_async("the command ends and the descriptors are closed", 10, async || {
        let processes = machine.exec(&id, &["ps"], 0).await.expect("exec").stdout;
        descriptors() <= before && !String::from_utf8_lossy(&processes).contains(" cat")
    })
    .await;
    drop(streams);
    machine.restart(Duration::ZERO).await;
    machine.remove_pod(&pod).await;
}

/// Whether a keepalive timer runs for the other end of a connection in this namespace.
fn keepalive_is_active(client: &TcpStream) -> bool {
    let [own, other] = [client.local_addr(), client.peer_addr()].map(|of| of.expect("address").port());
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").expect("sockets");
    let mut ends = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let is_end = |at: &str, port: u16| at.ends_with(&format!(":{port:04X}"));
    let end = ends.find(|f| is_end(f[1], other) && is_end(f[2], own) && f[3] == "01");
    end.is_some_and(|fields| fields[5].starts_with("02:"))
}

pub(crate) async fn a_silent_client_is_disconnected(machine: &mut Machine) {
    let streams = Streams::open(machine).await;
    let mut client = TcpStream::connect(&streams.address).await.expect("connect");
    // The kernel sends keepalive probes: a timer runs for the server's end as soon as it is accepted.
    eventually_async("a keepalive timer", 20, async || {
        let is_active = keepalive_is_active(&client);
        if !is_active && timeout(Duration::from_millis(20), client.readable()).await.is_ok() {
            // The connection was closed before the check.
            client = TcpStream::connect(&streams.address).await.expect("connect");
        }
        is_active
    })
    .await;
    let ended = timeout(Duration::from_secs(60), client.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok(), "the head of a request must come in time");
}
