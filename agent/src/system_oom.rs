//! Events `SystemOOM`: the kernel killed a process because the machine has no free memory.
//!
//! The kernel's log reports each killed process. As in the kubelet, a process that is killed at the memory limit of a
//! cgroup causes no such event. Source: `pkg/kubelet/oom`.
#![allow(unsafe_code, reason = "tokio requires the promise that a descriptor which it polls stays open")]

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::event_recorder::{Level, Recorder};

const LOG: &str = "/dev/kmsg";
/// Maximum bytes of a record (`PRINTK_MESSAGE_MAX` of the kernel). One read returns one record.
const MAX_RECORD: usize = 8192;
/// Minimum of the first field in records that programs have written to the log. The field has the level in its lowest
/// three bits, and the facility above them. The kernel's facility is 0.
const PROGRAMS: u32 = 8;

/// A killed process.
#[derive(Debug, PartialEq, Eq)]
struct Victim<'a> {
    name: &'a str,
    pid: u32,
}

/// Records an event for each killed process. Returns if the kernel's log cannot be read, as in some containers.
pub(crate) async fn run(recorder: Recorder) {
    let log = match open() {
        Ok(log) => log,
        Err(error) => {
            tracing::info!(%error, "cannot read the kernel's log, so killed processes of the machine are not reported");
            return;
        }
    };
    let mut record = vec![0_u8; MAX_RECORD];
    loop {
        let length = match next(&log, &mut record).await {
            Ok(length) => length,
            Err(error) => {
                tracing::warn!(%error, "cannot read the kernel's log any more");
                return;
            }
        };
        let text = String::from_utf8_lossy(record.get(..length).unwrap_or_default());
        if let Some(Victim { name, pid }) = victim(&text) {
            let message = format!("System OOM encountered, victim process: {name}, pid: {pid}");
            recorder.node(Level::Warning, "SystemOOM", message);
        }
        // If a program writes records without end, every read succeeds at once. Yield, so that other tasks of the
        // thread can run.
        tokio::task::yield_now().await;
    }
}

/// Opens the kernel's log at its end, because an earlier agent has reported the older records.
fn open() -> io::Result<AsyncFd<File>> {
    let mut log = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(LOG)?;
    log.seek(SeekFrom::End(0))?;
    // SAFETY: the `AsyncFd` owns the file, and nothing else closes its descriptor.
    let registered = unsafe { AsyncFd::register_with_interest(log, Interest::READABLE) };
    registered.map_err(|error| io::Error::other(error.to_string()))
}

/// Waits for the next record, and returns its length.
async fn next(log: &AsyncFd<File>, record: &mut [u8]) -> io::Result<usize> {
    loop {
        let mut ready = log.readable().await?;
        match ready.try_io(|log| log.get_ref().read(record)) {
            Ok(Ok(0)) => return Err(ErrorKind::UnexpectedEof.into()),
            // The kernel has overwritten records that were not read yet. The next read returns the oldest record.
            Ok(Err(error)) if error.kind() == ErrorKind::BrokenPipe => {}
            Ok(read) => return read,
            Err(_would_block) => {}
        }
    }
}

/// The process that a record reports as killed, because the whole machine has no free memory.
fn victim(record: &str) -> Option<Victim<'_>> {
    let (prefix, text) = record.split_once(';')?;
    let kind: u32 = prefix.split(',').next()?.parse().ok()?;
    if kind >= PROGRAMS {
        return None;
    }
    let fields = text.lines().next()?.strip_prefix("oom-kill:constraint=")?;
    let (head, _) = fields.split_once(",task_memcg=")?;
    if fields.starts_with("CONSTRAINT_MEMCG,") || !head.ends_with(",global_oom") {
        return None;
    }
    // A process can choose any name, so the fields are read from the end.
    let (fields, _uid) = fields.rsplit_once(",uid=")?;
    let (fields, pid) = fields.rsplit_once(",pid=")?;
    let (_, name) = fields.rsplit_once(",task=")?;
    Some(Victim { name, pid: pid.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_memory_of_the_machine_is_reported() {
        let record = |constraint: &str, of: &str, task: &str| {
            format!(
                "6,2094,511716,-;oom-kill:constraint={constraint},nodemask=(null),cpuset=/,mems_allowed=0,{of},\
                 task_memcg=/kubepods/podx,task={task},pid=1234,uid=0\n SUBSYSTEM=x\n"
            )
        };
        let found = |text: &str| victim(text).map(|victim| (victim.name.to_owned(), victim.pid));
        let global = record("CONSTRAINT_NONE", "global_oom", "stress");
        assert_eq!(found(&global), Some(("stress".to_owned(), 1234)));
        let forged = record("CONSTRAINT_NONE", "global_oom", "a,pid=1,uid=0");
        assert_eq!(found(&forged), Some(("a,pid=1,uid=0".to_owned(), 1234)));
        let by_a_program = format!("12{}", global.trim_start_matches('6'));
        for other in [
            by_a_program,
            record("CONSTRAINT_MEMCG", "oom_memcg=/kubepods/podx", "stress"),
            record("CONSTRAINT_MEMCG", "oom_memcg=/x,global_oom", "stress"),
            "6,2095,511717,-;Out of memory: Killed process 1234 (stress)".to_owned(),
            "oom-kill:constraint=CONSTRAINT_NONE".to_owned(),
            String::new(),
        ] {
            assert_eq!(found(&other), None, "{other}");
        }
    }
}
