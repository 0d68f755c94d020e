//! Real files, written, rotated and removed as the runtime does it.

use std::io::Write;
use std::time::Duration;

use coracle_proto::cri::{ContainerEventResponse, ContainerEventType};
use futures::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::*;

struct Log {
    path: PathBuf,
    rotations: u32,
}

impl Log {
    fn new(name: &str) -> Log {
        let dir = std::env::temp_dir().join(format!("coracle-follow-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).expect("temp dir");
        Log { path: dir.join("0.log"), rotations: 0 }
    }

    fn write(&self, text: &str) {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(&self.path).expect("log");
        file.write_all(format!("2026-01-01T00:00:00Z stdout F {text}\n").as_bytes()).expect("write");
    }

    fn rotate(&mut self) {
        self.rotations += 1;
        let to = format!("{}.20260101-{:06}", self.path.display(), self.rotations);
        fs::rename(&self.path, to).expect("rotate");
    }

    async fn all(&self, options: Options) -> String {
        let (sender, receiver) = mpsc::channel(4);
        let (read, chunks) = tokio::join!(
            read(self.path.clone(), options, Ended::of_stopped(), LogWatches::open(), sender),
            ReceiverStream::new(receiver).collect::<Vec<_>>()
        );
        read.expect("read");
        String::from_utf8(chunks.concat()).expect("text")
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = self.path.parent().map(fs::remove_dir_all);
    }
}

/// A follower of a container whose end the test sends.
struct Follower {
    chunks: mpsc::Receiver<Bytes>,
    events: mpsc::Sender<Result<ContainerEventResponse, crate::runtime::RuntimeError>>,
    task: tokio::task::JoinHandle<Result<(), ReadError>>,
    seen: String,
}

impl Follower {
    fn start(log: &Log, options: Options) -> Follower {
        let (sender, chunks) = mpsc::channel(1);
        let (events, receiver) = mpsc::channel(4);
        let ended = Ended::by("c1", ReceiverStream::new(receiver).boxed());
        let task = tokio::spawn(read(log.path.clone(), options, ended, LogWatches::open(), sender));
        Follower { chunks, events, task, seen: String::new() }
    }

    async fn until(&mut self, wanted: &str) {
        let waiting = async {
            while !self.seen.ends_with(wanted) {
                let chunk = self.chunks.recv().await.expect("more of the log");
                self.seen.push_str(std::str::from_utf8(&chunk).expect("text"));
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting)
            .await
            .unwrap_or_else(|_| panic!("waited for {wanted:?}"));
    }

    async fn send_event(&self, id: &str, kind: ContainerEventType) {
        let event = ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind.into(),
            ..Default::default()
        };
        self.events.send(Ok(event)).await.expect("a listener");
    }

    async fn finish(mut self) -> String {
        while let Some(chunk) = self.chunks.recv().await {
            self.seen.push_str(std::str::from_utf8(&chunk).expect("text"));
        }
        self.task.await.expect("join").expect("read");
        self.seen
    }
}

#[tokio::test]
async fn a_log_is_read_over_its_rotations() {
    let mut log = Log::new("rotations");
    log.write("a");
    log.rotate();
    log.write("b");
    log.rotate();
    log.write("c");
    assert_eq!(log.all(Options::default()).await, "a\nb\nc\n");
    assert_eq!(log.all(Options { tail: Some(2), ..Options::default() }).await, "b\nc\n");
    assert_eq!(log.all(Options { tail: Some(0), ..Options::default() }).await, "");
    assert_eq!(log.all(Options { limit: Some(3), ..Options::default() }).await, "a\nb");
}

#[tokio::test]
async fn following_continues_over_rotations_and_ends_with_the_container() {
    let mut log = Log::new("follow");
    log.write("old");
    let mut follower = Follower::start(&log, Options { follow: true, ..Options::default() });
    follower.until("old\n").await;
    log.write("one");
    follower.until("one\n").await;
    log.rotate();
    log.write("two");
    follower.until("two\n").await;
    for text in ["three", "four"] {
        log.write(text);
        log.rotate();
    }
    log.write("five");
    follower.until("three\nfour\nfive\n").await;
    follower.send_event("another", ContainerEventType::ContainerStoppedEvent).await;
    follower.send_event("c1", ContainerEventType::ContainerStartedEvent).await;
    log.write("last");
    follower.send_event("c1", ContainerEventType::ContainerStoppedEvent).await;
    assert_eq!(follower.finish().await, "old\none\ntwo\nthree\nfour\nfive\nlast\n");
}

#[tokio::test]
async fn a_truncated_or_absent_log_is_followed() {
    let log = Log::new("empty");
    let mut follower = Follower::start(&log, Options { follow: true, ..Options::default() });
    tokio::task::yield_now().await;
    log.write("first and long");
    follower.until("first and long\n").await;
    fs::OpenOptions::new().write(true).truncate(true).open(&log.path).expect("truncate");
    log.write("x");
    follower.until("x\n").await;
    follower.send_event("c1", ContainerEventType::ContainerDeletedEvent).await;
    follower.finish().await;
}

#[tokio::test]
async fn reading_ends_when_the_client_disconnects() {
    let log = Log::new("leaves");
    log.write("a");
    let mut follower = Follower::start(&log, Options { follow: true, ..Options::default() });
    follower.until("a\n").await;
    drop(follower.chunks);
    let ended = tokio::time::timeout(Duration::from_secs(60), follower.task).await;
    ended.expect("in time").expect("join").expect("read");
}

#[tokio::test]
async fn a_line_that_is_half_written_waits_for_its_end() {
    let log = Log::new("half");
    let mut file = fs::OpenOptions::new().create(true).append(true).open(&log.path).expect("log");
    file.write_all(b"2026-01-01T00:00:00Z stdout F a\n2026-01-01T00:00:00Z stdout F ha").expect("write");
    let mut follower = Follower::start(&log, Options { follow: true, ..Options::default() });
    // Both lines are in one chunk of the file, so the follower has also read the half-written line.
    follower.until("a\n").await;
    file.write_all(b"lf\n").expect("write");
    follower.until("half\n").await;
    follower.send_event("c1", ContainerEventType::ContainerStoppedEvent).await;
    assert_eq!(follower.finish().await, "a\nhalf\n");
}

#[tokio::test]
async fn a_line_without_an_end_takes_no_memory_and_hides_no_other() {
    let dir = std::env::temp_dir().join(format!("coracle-logs-{}-endless", std::process::id()));
    std::fs::create_dir_all(&dir).expect("temp dir");
    let log = dir.join("0.log");
    let huge = "x".repeat(3 * super::super::line::LINE_MAX);
    let head = "2026-01-01T00:00:00Z stdout F";
    std::fs::write(&log, format!("{head} a\n{head} {huge}\n{head} b\n")).expect("file");
    let mut reader = Reader::begin(log.clone(), &Options::default(), &|| false).expect("reader");
    let (sender, mut receiver) = mpsc::channel(64);
    reader.drain(&sender).await.expect("read");
    assert!(reader.rest.capacity() <= 2 * super::super::line::LINE_MAX);
    drop(sender);
    let mut out = Vec::new();
    while let Some(bytes) = receiver.recv().await {
        out.extend_from_slice(&bytes);
    }
    assert_eq!(out, b"a\nb\n");
    let at = files::tail(&[log], 5, &|| false).expect("tail");
    assert_eq!(at, (0, (head.len() * 2 + huge.len() + 5) as u64), "behind the line that is too long");
    std::fs::remove_dir_all(dir).expect("clean up");
}

#[tokio::test]
async fn skipped_lines_do_not_delay_other_tasks() {
    let dir = std::env::temp_dir().join(format!("coracle-logs-{}-yields", std::process::id()));
    std::fs::create_dir_all(&dir).expect("temp dir");
    let log = dir.join("0.log");
    std::fs::write(&log, "2026-01-01T00:00:00Z stdout F x\n".repeat(20 * CHUNK / 32)).expect("file");
    let options = Options { only: Some(super::super::output::Output::Stderr), ..Options::default() };
    let mut reader = Reader::begin(log, &options, &|| false).expect("reader");
    let (sender, _receiver) = mpsc::channel(1);
    let yields = tokio::spawn(async {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    });
    reader.drain(&sender).await.expect("read");
    assert!(yields.is_finished(), "the other task ran meanwhile");
    std::fs::remove_dir_all(dir).expect("clean up");
}

#[test]
fn a_removed_file_is_closed_and_reading_continues_with_the_oldest_one() {
    let mut log = Log::new("removed");
    log.write("lost");
    let mut reader = Reader::begin(log.path.clone(), &Options::default(), &|| false).expect("reader");
    reader.close_removed();
    assert!(reader.file.is_some());
    fs::remove_file(&log.path).expect("remove");
    log.write("old");
    log.rotate();
    log.write("new");
    reader.close_removed();
    assert!(reader.file.is_none());
    let mut chunk = [0; 256];
    let read = reader.read(&mut chunk).expect("read");
    assert!(String::from_utf8_lossy(&chunk[..read]).ends_with("F old\n"));
}
