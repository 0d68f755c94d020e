//! Memory for the outputs of all ExecSync calls: a limit for the node, and one for each sandbox.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::lock::locked;

/// Maximum bytes of the outputs of all calls.
const NODE_MAX: usize = 64 << 20;
/// Maximum bytes of the outputs of the calls for one sandbox: two full outputs.
const SANDBOX_MAX: usize = 32 << 20;
/// Bytes of each call that are not counted. So the large outputs of one sandbox do not fail the probes of another
/// sandbox.
const UNCOUNTED: usize = 128 << 10;

/// The memory that all calls share. Clones are handles of the same memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputMemory {
    usage: Arc<Mutex<Usage>>,
}

#[derive(Debug, Default)]
struct Usage {
    total: usize,
    /// Bytes in use by sandbox id. A sandbox that uses no memory has no entry.
    sandboxes: HashMap<String, usize>,
}

/// The part of the memory that one call uses. A drop releases it.
#[derive(Debug)]
pub(super) struct Share {
    memory: OutputMemory,
    sandbox: String,
    counted: usize,
}

/// The limit that an output would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full {
    /// The pods whose outputs have the limit, for the error message: `this pod` or `all pods`.
    pub(super) scope: &'static str,
    /// The limit in bytes.
    pub(super) limit: usize,
}

// === impl OutputMemory ===

impl OutputMemory {
    /// An empty share for a call that runs in a container of this sandbox.
    pub(super) fn share(&self, sandbox: &str) -> Share {
        Share { memory: self.clone(), sandbox: sandbox.to_owned(), counted: 0 }
    }
}

// === impl Share ===

impl Share {
    /// Grows the share to `bytes`. A smaller number has no effect.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let more = bytes.saturating_sub(UNCOUNTED).saturating_sub(self.counted);
        if more == 0 {
            return Ok(());
        }
        let mut usage = locked(&self.memory.usage);
        let sandbox = usage.sandboxes.get(&self.sandbox).copied().unwrap_or_default();
        for (scope, used, limit) in [("this pod", sandbox, SANDBOX_MAX), ("all pods", usage.total, NODE_MAX)]
        {
            if used + more > limit {
                return Err(Full { scope, limit });
            }
        }
        usage.total += more;
        usage.sandboxes.insert(self.sandbox.clone(), sandbox + more);
        self.counted += more;
        Ok(())
    }

    /// Releases the whole share.
    pub(super) fn clear(&mut self) {
        let counted = std::mem::take(&mut self.counted);
        if counted == 0 {
            return;
        }
        let mut usage = locked(&self.memory.usage);
        usage.total -= counted;
        if let Some(used) = usage.sandboxes.get_mut(&self.sandbox) {
            *used -= counted;
            if *used == 0 {
                usage.sandboxes.remove(&self.sandbox);
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_and_the_node_have_limits_and_small_outputs_always_fit() {
        let memory = OutputMemory::default();
        let mut first = memory.share("a");
        first.grow(SANDBOX_MAX).expect("fits");
        let mut second = memory.share("a");
        assert_eq!(second.grow(2 * UNCOUNTED + 1), Err(Full { scope: "this pod", limit: SANDBOX_MAX }));
        second.grow(UNCOUNTED).expect("small outputs fit");
        let mut third = memory.share("b");
        third.grow(SANDBOX_MAX).expect("another sandbox has its own limit");
        let mut fourth = memory.share("c");
        assert_eq!(fourth.grow(4 * UNCOUNTED), Err(Full { scope: "all pods", limit: NODE_MAX }));
        fourth.grow(UNCOUNTED).expect("small outputs fit");
    }

    #[test]
    fn a_dropped_share_is_free_again() {
        let memory = OutputMemory::default();
        for _ in 0..10 {
            let mut share = memory.share("a");
            share.grow(SANDBOX_MAX).expect("fits");
            share.grow(UNCOUNTED).expect("a smaller number changes nothing");
        }
        let usage = locked(&memory.usage);
        assert!(usage.total == 0 && usage.sandboxes.is_empty(), "{usage:?}");
    }
}
