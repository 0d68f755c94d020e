//! Token buckets by key. Above the capacity the least recently used bucket is evicted.

use std::collections::{BTreeMap, HashMap};

use coracle_token_bucket::{Rate, TokenBucket};
use tokio::time::Instant;

use crate::remote::cache::Key;

pub(super) struct Buckets {
    rate: Rate,
    /// Maximum number of buckets.
    capacity: usize,
    /// Buckets by key.
    by_key: HashMap<Key, Bucket>,
    /// Keys ordered by the sequence number of their last use.
    by_use: BTreeMap<u64, Key>,
    uses: u64,
}

struct Bucket {
    tokens: TokenBucket,
    filled: Instant,
    last_use: u64,
}

// === impl Buckets ===

impl Buckets {
    pub(super) fn new(rate: Rate, capacity: usize) -> Self {
        Self { rate, capacity, by_key: HashMap::new(), by_use: BTreeMap::new(), uses: 0 }
    }

    /// Takes a token. A new bucket is full. Returns false if the bucket was empty.
    pub(super) fn take(&mut self, key: Key, now: Instant) -> bool {
        self.uses += 1;
        let (rate, last_use) = (self.rate, self.uses);
        let new = || Bucket { tokens: TokenBucket::full(rate), filled: now, last_use };
        let bucket = self.by_key.entry(key).or_insert_with(new);
        self.by_use.remove(&bucket.last_use);
        self.by_use.insert(last_use, key);
        bucket.last_use = last_use;
        let has_token = bucket.tokens.take(rate, now.saturating_duration_since(bucket.filled));
        bucket.filled = now;
        while self.by_key.len() > self.capacity {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            self.by_key.remove(&oldest);
        }
        has_token
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::cache::key;

    #[test]
    fn the_bucket_that_was_not_used_for_the_longest_time_is_evicted() {
        let mut buckets = Buckets::new(Rate { per_second: 1.0, burst: 1.0 }, 2);
        let now = Instant::now();
        let mut take = |name: &str| buckets.take(key(&[name.as_bytes()]), now);
        assert!(take("a") && take("b") && !take("a"));
        // This evicts b, so a is still empty and b is full again.
        assert!(take("c") && !take("a") && take("b"));
        for number in 0..100 {
            assert!(take(&number.to_string()));
        }
        assert_eq!((buckets.by_key.len(), buckets.by_use.len()), (2, 2));
    }
}
