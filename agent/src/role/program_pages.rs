//! Returns memory to the kernel: pages of code and free memory that were only needed during the start or by finished
//! work.
#![allow(unsafe_code, reason = "advice about memory has no safe wrapper")]

use std::io;
use std::time::Duration;

use tokio::sync::watch;

#[cfg(target_pointer_width = "32")]
use libc::Elf32_Phdr as Header;
#[cfg(target_pointer_width = "64")]
use libc::Elf64_Phdr as Header;

/// Time after which a start is complete, and after which a node without events is idle.
const IDLE_AFTER: Duration = Duration::from_secs(3);
/// Time for the work of a heartbeat: the renewal of the lease, and the updates of status and network at the same time.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// Time after which the work that the last change caused has ended, too.
#[cfg(feature = "controlplane")]
const AFTER_CHANGES: Duration = Duration::from_secs(30);

/// Releases the program's pages some time after the start.
pub(super) async fn release_after_start() {
    tokio::time::sleep(IDLE_AFTER).await;
    release_pages();
}

/// Releases the program's pages and free memory each time the process becomes idle after changes: of pods, of the
/// store, or by requests to another API server. Also releases them after each heartbeat of an idle node. An idle
/// process has no timer between heartbeats.
pub(super) async fn release_when_idle<T>(changes: watch::Receiver<T>, heartbeats: watch::Receiver<()>) {
    when_idle(changes, heartbeats, release_pages).await;
}

/// Sends the heartbeats of a process without a node: one heartbeat after each burst of changes. Work that the changes
/// caused, for example in the store, may end after the first release.
#[cfg(feature = "controlplane")]
pub(super) async fn heartbeat_after_changes<T>(
    mut changes: watch::Receiver<T>,
    heartbeats: watch::Sender<()>,
) {
    while changes.changed().await.is_ok() {
        while let Ok(Ok(())) = tokio::time::timeout(AFTER_CHANGES, changes.changed()).await {}
        heartbeats.send_replace(());
    }
}

async fn when_idle<T>(
    mut changes: watch::Receiver<T>,
    mut heartbeats: watch::Receiver<()>,
    mut release: impl FnMut(),
) {
    loop {
        // Both arms are cancel-safe: a channel keeps a change that was not received. The second arm is disabled after
        // the agent has ended.
        let mut pause = tokio::select! {
            changed = changes.changed() => match changed {
                Ok(()) => IDLE_AFTER,
                Err(_closed) => return,
            },
            Ok(()) = heartbeats.changed() => HEARTBEAT,
        };
        // During changes the pages are needed. So each change restarts the wait.
        while let Ok(Ok(())) = tokio::time::timeout(pause, changes.changed()).await {
            pause = IDLE_AFTER;
        }
        heartbeats.mark_unchanged();
        release();
    }
}

/// Releases the mapped pages of the program's code and constants. The kernel maps 16 pages with each page fault. Pages
/// that are needed later are mapped again, usually from the page cache.
fn release_pages() {
    crate::allocator::collect();
    for (start, length) in program_headers().into_iter().filter_map(|(base, header)| unwritten(base, header))
    {
        // SAFETY: the segment is mapped from the program's file and cannot be written. So released pages have the same
        // content when they are loaded again.
        if unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) } != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "cannot release the program's pages");
        }
    }
}

/// The program's headers with the address at which the program is loaded.
fn program_headers() -> Vec<(usize, Header)> {
    unsafe extern "C" fn take(
        info: *mut libc::dl_phdr_info,
        _: usize,
        into: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: dl_iterate_phdr passes a valid object, and our vector.
        let (info, into) = unsafe { (&*info, &mut *into.cast::<Vec<(usize, Header)>>()) };
        for at in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the table has this number of headers.
            let header = unsafe { *info.dlpi_phdr.add(at) };
            into.extend(usize::try_from(info.dlpi_addr).map(|base| (base, header)));
        }
        // The program is the first object; libraries follow.
        1
    }
    let mut headers = Vec::new();
    // SAFETY: the callback gets the vector only during this call.
    unsafe { libc::dl_iterate_phdr(Some(take), (&raw mut headers).cast()) };
    headers
}

/// Address and length of the whole pages of a segment that is loaded and cannot be written. The relocated constants of a
/// position-independent program belong to the writable segment.
fn unwritten(base: usize, header: Header) -> Option<(usize, usize)> {
    /// A multiple of every page size.
    const PAGE: usize = 64 << 10;
    if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
        return None;
    }
    let start = base.checked_add(usize::try_from(header.p_vaddr).ok()?)?;
    let end = start.checked_add(usize::try_from(header.p_filesz).ok()?)?;
    let (start, end) = (start.checked_next_multiple_of(PAGE)?, end / PAGE * PAGE);
    end.checked_sub(start).filter(|length| *length > 0).map(|length| (start, length))
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::task::JoinHandle;

    use super::*;

    #[cfg(target_pointer_width = "64")]
    fn header(kind: u32, flags: u32, address: u64, size: u64) -> Header {
        Header {
            p_type: kind,
            p_flags: flags,
            p_offset: 0,
            p_vaddr: address,
            p_paddr: address,
            p_filesz: size,
            p_memsz: size,
            p_align: 4096,
        }
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn only_whole_pages_of_segments_that_cannot_be_written_are_released() {
        let (read, execute, write) = (libc::PF_R, libc::PF_R | libc::PF_X, libc::PF_R | libc::PF_W);
        let of = |kind, flags| unwritten(0x10_0000, header(kind, flags, 0x1_1000, 0x3_2000));
        assert_eq!(of(libc::PT_LOAD, read), Some((0x12_0000, 0x2_0000)));
        assert_eq!(of(libc::PT_LOAD, execute), of(libc::PT_LOAD, read));
        assert_eq!(of(libc::PT_LOAD, write), None);
        assert_eq!(of(libc::PT_GNU_RELRO, read), None);
        assert_eq!(unwritten(0, header(libc::PT_LOAD, read, 0x1000, 0x1000)), None);
        assert_eq!(unwritten(usize::MAX, header(libc::PT_LOAD, read, u64::MAX, 1)), None);
    }

    /// A node that records the times at which pages are released.
    struct Node {
        changes: watch::Sender<()>,
        heartbeats: watch::Sender<()>,
        releases: mpsc::UnboundedReceiver<Duration>,
        waiting: JoinHandle<()>,
    }

    fn node() -> Node {
        let (changes, changed) = watch::channel(());
        let (heartbeats, beat) = watch::channel(());
        let (released, releases) = mpsc::unbounded_channel();
        let started = tokio::time::Instant::now();
        let release = move || {
            let _delivered = released.send(started.elapsed());
        };
        Node { changes, heartbeats, releases, waiting: tokio::spawn(when_idle(changed, beat, release)) }
    }

    #[tokio::test(start_paused = true)]
    async fn pages_are_released_after_changes_and_after_heartbeats_of_an_idle_node() {
        let Node { changes, heartbeats, mut releases, waiting } = node();
        tokio::task::yield_now().await;
        changes.send_replace(());
        tokio::time::sleep(IDLE_AFTER / 2).await;
        // Pods are still changing: the heartbeat alone does not release pages that are needed.
        heartbeats.send_replace(());
        changes.send_replace(());
        assert!(releases.recv().await.is_some_and(|at| at >= IDLE_AFTER / 2 * 3));
        tokio::time::sleep(IDLE_AFTER).await;
        assert!(releases.try_recv().is_err());
        heartbeats.send_replace(());
        assert!(releases.recv().await.is_some());
        drop((changes, heartbeats));
        assert!(waiting.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn pages_stay_while_pods_change_after_a_heartbeat() {
        let Node { changes, heartbeats, mut releases, waiting } = node();
        heartbeats.send_replace(());
        tokio::time::sleep(HEARTBEAT / 2).await;
        changes.send_replace(());
        assert!(releases.recv().await.is_some_and(|at| at >= HEARTBEAT / 2 + IDLE_AFTER));
        drop((changes, heartbeats));
        assert!(waiting.await.is_ok());
    }

    #[cfg(feature = "controlplane")]
    #[tokio::test(start_paused = true)]
    async fn a_process_without_a_node_has_one_heartbeat_after_a_burst_of_changes() {
        let (changes, changed) = watch::channel(());
        let (beats, mut beat) = watch::channel(());
        let beating = tokio::spawn(heartbeat_after_changes(changed, beats));
        let started = tokio::time::Instant::now();
        for _ in 0..3 {
            changes.send_replace(());
            tokio::time::sleep(IDLE_AFTER).await;
        }
        assert!(beat.changed().await.is_ok());
        assert!(started.elapsed() >= IDLE_AFTER * 2 + AFTER_CHANGES);
        assert!(tokio::time::timeout(AFTER_CHANGES * 10, beat.changed()).await.is_err(), "it is idle");
        drop(changes);
        assert!(beating.await.is_ok());
    }

    #[test]
    fn the_program_has_code_to_release_and_runs_on() {
        let found = program_headers();
        let released: usize = found
            .iter()
            .filter_map(|(base, header)| unwritten(*base, *header))
            .map(|(_, length)| length)
            .sum();
        assert!(released > 64 << 10, "{released}");
        release_pages();
        assert_eq!(program_headers().len(), found.len());
    }
}
