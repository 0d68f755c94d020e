//! The global allocator, chosen by the role of the process. jemalloc is for servers, whose threads serve many pods.
//! dlmalloc is for shims, for short commands, and for builds with a C library other than musl.
//!
//! `docs/decisions/allocator.md` has the measurements. dlmalloc has one lock and returns little memory to the kernel
//! after a load. But its state takes one page, and each pod has a shim. A pointer must be freed by the allocator that
//! allocated it, so the choice is made once, at the beginning of `main`. The standard library's allocations before
//! `main` come from a small static area, which is never freed.
#![allow(unsafe_code, reason = "an allocator is unsafe by its interface")]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::io::Read;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use dlmalloc::GlobalDlmalloc as Compact;
#[cfg(not(target_env = "musl"))]
use dlmalloc::GlobalDlmalloc as Threaded;
#[cfg(target_env = "musl")]
use tikv_jemallocator::Jemalloc as Threaded;

/// Subcommands of long-running servers with several threads.
const SERVERS: [&[u8]; 4] = [b"up", b"agent", b"controlplane", b"runtime"];
/// Size of the static area in bytes. The standard library uses less than 100.
const EARLY_SIZE: usize = 4096;
/// Maximum bytes of the command line that are read.
const COMMAND_LINE: usize = 4096;

/// jemalloc's options, read at its first use. Two arenas for two workers. Free pages are returned to the kernel after a
/// second, during another allocation or deallocation: there is no background thread. Huge pages are disabled. Debian's
/// kernel makes them by default, but it would join returned pages into huge pages again, and the memory would stay in
/// use. Threads cache no blocks above 4 KiB: a sleeping thread would keep its blocks.
#[cfg(target_env = "musl")]
#[unsafe(export_name = "_rjem_malloc_conf")]
static MALLOC_CONF: &[u8; 73] = b"narenas:2,dirty_decay_ms:1000,muzzy_decay_ms:0,thp:never,tcache_max:4096\0";

const UNDECIDED: u8 = 0;
const COMPACT: u8 = 1;
const SERVER: u8 = 2;

/// Test programs have their own `main`.
static KIND: AtomicU8 = AtomicU8::new(if cfg!(test) { COMPACT } else { UNDECIDED });
static EARLY: StartupArena =
    StartupArena { area: UnsafeCell::new([0; EARLY_SIZE]), used: AtomicUsize::new(0) };

/// The global allocator.
pub(crate) struct RoleAllocator;

/// A static area; each byte is allocated once.
struct StartupArena {
    area: UnsafeCell<[u8; EARLY_SIZE]>,
    used: AtomicUsize,
}

// SAFETY: `used` gives each byte of the area to one caller only.
unsafe impl Sync for StartupArena {}

/// Chooses the allocator by the command line. Must be called first in `main`, before a second thread exists.
pub(crate) fn choose() {
    let mut text = [0; COMMAND_LINE];
    let read = std::fs::File::open("/proc/self/cmdline").and_then(|mut file| file.read(&mut text));
    let words = text.get(..read.unwrap_or_default()).unwrap_or_default();
    let kind = if is_server(words) { SERVER } else { COMPACT };
    KIND.store(kind, Ordering::Relaxed);
}

/// Returns free memory to the kernel. Called while the process is idle.
#[cfg(target_env = "musl")]
pub(crate) fn collect() {
    /// Operations of jemalloc(3) that return free memory. They flush the cache of the calling thread and purge all
    /// arenas. 4096 is the index for all arenas (`MALLCTL_ARENAS_ALL`).
    const CONTROLS: [&std::ffi::CStr; 2] = [c"thread.tcache.flush", c"arena.4096.purge"];
    if KIND.load(Ordering::Relaxed) != SERVER {
        return;
    }
    for control in CONTROLS {
        let none = std::ptr::null_mut();
        // SAFETY: the name is null-terminated, and these controls have no input or output value.
        let error =
            unsafe { tikv_jemalloc_sys::mallctl(control.as_ptr(), none, std::ptr::null_mut(), none, 0) };
        if error != 0 {
            tracing::debug!(error, ?control, "cannot return free memory to the kernel");
        }
    }
}

/// dlmalloc has no such operation.
#[cfg(not(target_env = "musl"))]
pub(crate) fn collect() {}

/// Whether an argument is the subcommand of a server. A shim has no such argument, for any name of its directory.
fn is_server(command_line: &[u8]) -> bool {
    command_line.split(|byte| *byte == 0).skip(1).any(|word| SERVERS.contains(&word))
}

// === impl StartupArena ===

impl StartupArena {
    fn take(&self, layout: Layout) -> *mut u8 {
        let start = self.area.get().cast::<u8>();
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let padding = start.wrapping_add(used).align_offset(layout.align());
            let Some(begin) = used.checked_add(padding) else { return std::ptr::null_mut() };
            let end = begin.checked_add(layout.size()).filter(|end| *end <= EARLY_SIZE);
            let Some(end) = end else { return std::ptr::null_mut() };
            match self.used.compare_exchange_weak(used, end, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return start.wrapping_add(begin),
                Err(now) => used = now,
            }
        }
    }

    fn contains_pointer(&self, pointer: *mut u8) -> bool {
        pointer.addr().wrapping_sub(self.area.get().addr()) < EARLY_SIZE
    }
}

// === impl RoleAllocator ===

// SAFETY: each block comes from one of three allocators that keep the contract, and is freed by the same allocator.
// Blocks outside of the early area were allocated after the choice, which never changes.
unsafe impl GlobalAlloc for RoleAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match KIND.load(Ordering::Relaxed) {
            // SAFETY: the caller keeps the contract of `alloc`.
            SERVER => unsafe { Threaded.alloc(layout) },
            // SAFETY: as above.
            COMPACT => unsafe { Compact.alloc(layout) },
            _ => EARLY.take(layout),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match KIND.load(Ordering::Relaxed) {
            // SAFETY: the caller keeps the contract of `alloc_zeroed`.
            SERVER => unsafe { Threaded.alloc_zeroed(layout) },
            // SAFETY: as above.
            COMPACT => unsafe { Compact.alloc_zeroed(layout) },
            // Each byte is allocated once, so it still is zero.
            _ => EARLY.take(layout),
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if EARLY.contains_pointer(pointer) {
            return;
        }
        if KIND.load(Ordering::Relaxed) == SERVER {
            // SAFETY: the pointer is not in the early area, so this allocator allocated it.
            unsafe { Threaded.dealloc(pointer, layout) };
        } else {
            // SAFETY: as above.
            unsafe { Compact.dealloc(pointer, layout) };
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if EARLY.contains_pointer(pointer) {
            // SAFETY: the caller guarantees that the size, rounded up to the alignment, does not overflow.
            let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
            // SAFETY: the caller guarantees a size above zero.
            let moved = unsafe { self.alloc(wanted) };
            if !moved.is_null() {
                // SAFETY: both blocks have at least this many bytes, and the new one does not overlap the old one.
                unsafe { std::ptr::copy_nonoverlapping(pointer, moved, layout.size().min(size)) };
            }
            return moved;
        }
        if KIND.load(Ordering::Relaxed) == SERVER {
            // SAFETY: the pointer is not in the early area, so this allocator allocated it.
            unsafe { Threaded.realloc(pointer, layout, size) }
        } else {
            // SAFETY: as above.
            unsafe { Compact.realloc(pointer, layout, size) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_recognised_by_their_subcommand() {
        assert!(is_server(b"coracle\0up\0--state-dir\0/x\0"));
        assert!(is_server(b"/usr/bin/coracle\0--log-format\0json\0agent\0"));
        assert!(!is_server(b"/proc/self/exe\0shim\0--dir\0/run/up\0"));
        assert!(!is_server(b"up\0image\0list\0"));
        assert!(!is_server(b""));
    }

    #[test]
    fn early_memory_is_aligned_disjoint_and_limited() {
        let early = StartupArena { area: UnsafeCell::new([0; EARLY_SIZE]), used: AtomicUsize::new(0) };
        let one = early.take(Layout::new::<u8>());
        let two = early.take(Layout::new::<u64>());
        assert!(early.contains_pointer(one) && early.contains_pointer(two) && two.addr() > one.addr());
        assert_eq!(two.addr() % align_of::<u64>(), 0);
        assert!(early.take(Layout::new::<[u8; EARLY_SIZE]>()).is_null());
        assert!(!early.take(Layout::new::<u8>()).is_null());
        let mut outside = 0_u8;
        assert!(!early.contains_pointer(&raw mut outside));
    }
}
