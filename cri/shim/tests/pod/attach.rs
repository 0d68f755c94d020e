//! Attached clients, and connections into the pod.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use serde_json::json;

use crate::fixture::{Pod, until};
use crate::shim_client::{AttachTo, ErrorKind};

const OUTPUTS: AttachTo = AttachTo { stdin: false, stdout: true, stderr: true, output_capacity: 0 };
const INTERACTIVE: AttachTo = AttachTo { stdin: true, stderr: false, ..OUTPUTS };
/// A capacity that is a multiple of any page size.
const SMALL: u32 = 64 << 10;

pub(crate) async fn readers_get_what_is_written_and_a_slow_one_is_dropped(mut pod: Pod) {
    let create =
        pod.create_request("c", &pod.spec("c", "echo one; echo two >&2; head -c 3000000 /dev/zero; exit 0"));
    pod.shim.create(create).await.unwrap();
    let reader = pod.shim.attach("c", OUTPUTS).await.unwrap();
    let slow = pod.shim.attach("c", AttachTo { output_capacity: SMALL, ..OUTPUTS }).await.unwrap();
    let reading = std::thread::spawn(move || {
        let (mut out, mut err) = (Vec::new(), String::new());
        std::fs::File::from(reader.stdout.unwrap()).read_to_end(&mut out).unwrap();
        std::fs::File::from(reader.stderr.unwrap()).read_to_string(&mut err).unwrap();
        (out, err)
    });
    pod.shim.start("c").await.unwrap();
    // The output of `slow` is not read, and the container exits nevertheless.
    assert_eq!(pod.exit("c", "").await.code, 0);
    let (out, err) = reading.join().unwrap();
    assert!(out.starts_with(b"one\n"));
    assert_eq!(err, "two\n");
    let mut rest = Vec::new();
    std::fs::File::from(slow.stdout.unwrap()).read_to_end(&mut rest).unwrap();
    assert!(rest.len() <= SMALL as usize, "{}", rest.len());
    assert_eq!(pod.shim.attach("c", OUTPUTS).await.unwrap_err().kind, ErrorKind::WrongState);
    pod.end().await;
}

pub(crate) async fn stdin_goes_to_the_container_and_ends_with_its_only_writer(mut pod: Pod) {
    let mut create = pod.create_request("c", &pod.spec("c", "cat; echo end"));
    (create.stdin, create.stdin_once) = (true, true);
    pod.run_request(create).await;
    let attached = pod.shim.attach("c", INTERACTIVE).await.unwrap();
    let mut stdin = std::fs::File::from(attached.stdin.unwrap());
    stdin.write_all(b"typed\n").unwrap();
    drop(stdin);
    assert_eq!(pod.exit("c", "").await.code, 0);
    assert_eq!(pod.output("c", "stdout"), ["typed", "end"]);

    let mut create = pod.create_request("d", &pod.spec("d", "cat; echo end"));
    create.stdin = true;
    pod.run_request(create).await;
    let attached = pod.shim.attach("d", AttachTo { stdin: true, ..AttachTo::default() }).await.unwrap();
    std::fs::File::from(attached.stdin.unwrap()).write_all(b"first\n").unwrap();
    pod.until_logged("d", "first").await;
    // The standard input is still open for the next client.
    pod.shim.close_stdin("d").await.unwrap();
    assert_eq!(pod.exit("d", "").await.code, 0);
    assert_eq!(pod.output("d", "stdout"), ["first", "end"]);
    pod.end().await;
}

pub(crate) async fn a_terminal_is_attached_both_ways(mut pod: Pod) {
    let mut spec = pod.spec("c", "tty; read line; stty size; echo got $line; exit 6");
    spec["process"]["terminal"] = json!(true);
    let mut create = pod.create_request("c", &spec);
    (create.terminal, create.stdin) = (true, true);
    pod.run_request(create).await;
    let attached = pod.shim.attach("c", INTERACTIVE).await.unwrap();
    pod.shim.resize("c", 132, 43).await.unwrap();
    let mut terminal = UnixStream::from(attached.terminal.unwrap());
    terminal.write_all(b"hello\n").unwrap();
    assert_eq!(pod.exit("c", "").await.code, 6);
    let mut output = String::new();
    terminal.read_to_string(&mut output).unwrap();
    assert!(output.contains("43 132") && output.contains("got hello"), "{output}");
    assert!(
        pod.output("c", "stdout").iter().any(|line| line.starts_with("/dev/")),
        "{:?}",
        pod.output("c", "stdout")
    );
    pod.end().await;
}

pub(crate) async fn a_port_of_the_pod_is_reached_from_outside(pod: Pod) {
    // The runtime's network code brings the loopback up; here the test does.
    bring_up_loopback(pod.shim.pid());
    let error = pod.shim.connect_port(8080).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::ConnectionRefused, "{error}");
    pod.run("c", "echo ready; exec nc -l -p 8080 -e cat").await;
    pod.until_logged("c", "ready").await;
    let connect = async || pod.shim.connect_port(8080).await.ok();
    let mut stream = coracle_testing::eventually_async("the port is open", 10, connect).await;
    stream.set_nonblocking(false).unwrap();
    stream.write_all(b"ping\n").unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ping\n");
    drop(stream);
    pod.end().await;
}

/// Many attached clients do not exhaust the shim's descriptors.
pub(crate) async fn attached_clients_leave_descriptors_for_the_pod(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", pod.shim.pid())).unwrap().count();
    let before = descriptors();
    let mut attached = Vec::new();
    let error = loop {
        match pod.shim.attach("c", OUTPUTS).await {
            Ok(one) => attached.push(one),
            Err(error) => break error,
        }
        assert!(attached.len() < 1000, "there is no limit");
    };
    assert!(error.message.contains("clients that are attached to the pod"), "{error}");
    assert!(descriptors() <= before + 2 * attached.len());
    pod.run("d", "exit 3").await;
    assert_eq!(pod.exit("d", "").await.code, 3);
    pod.shim.delete("d").await.unwrap();
    drop(attached);
    let shim = pod.shim.pid();
    until(|| std::fs::read_dir(format!("/proc/{shim}/fd")).unwrap().count() <= before).await;
    pod.shim.attach("c", OUTPUTS).await.unwrap();
    pod.end().await;
}

pub(crate) async fn connections_in_progress_leave_descriptors_for_the_pod(mut pod: Pod) {
    bring_up_loopback(pod.shim.pid());
    // The server listens and is stopped with SIGSTOP, so its accept queue is soon full.
    let script = "nc -ll -p 8080 -e cat & while ! grep -q :1F90 /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done; \
        kill -STOP $!; echo ready; wait";
    pod.run("c", script).await;
    pod.until_logged("c", "ready").await;
    let mut connecting = tokio::task::JoinSet::new();
    for _ in 0..400 {
        let shim = pod.shim.clone();
        connecting.spawn(async move { shim.connect_port(8080).await });
    }
    let mut made = Vec::new();
    let error = loop {
        match connecting.join_next().await.unwrap().unwrap() {
            Ok(one) => made.push(one),
            Err(error) => break error,
        }
    };
    assert!(error.message.contains("are in progress already"), "{error}");
    let held = std::fs::read_dir(format!("/proc/{}/fd", pod.shim.pid())).unwrap().count();
    assert!(held < 300, "{held}");
    pod.run("d", "exit 3").await;
    assert_eq!(pod.exit("d", "").await.code, 3);
    drop(connecting);
    pod.end().await;
}

fn bring_up_loopback(pid: i32) {
    let file = format!("/proc/{pid}/ns/net");
    std::thread::spawn(move || {
        let namespace = std::fs::File::open(file).unwrap();
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        loopback::up(&socket);
    })
    .join()
    .unwrap();
}

mod loopback {
    #![allow(unsafe_code, reason = "SIOCSIFFLAGS has no safe wrapper")]

    use std::os::fd::AsRawFd as _;

    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);

    pub(super) fn up(socket: &std::net::UdpSocket) {
        // SAFETY: ifreq is plain data; all zeroes is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name[0] = libc::c_char::try_from(b'l').unwrap();
        request.ifr_name[1] = libc::c_char::try_from(b'o').unwrap();
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).unwrap();
        // SAFETY: the socket is open and the request outlives the call.
        unsafe { set_flags(socket.as_raw_fd(), &raw const request) }.unwrap();
    }
}
