//! Reads one blob in pieces: resumes broken transfers, if necessary at the next host, and verifies the
//! digest.
//!
//! ```text
//! all hosts, each resumes where the last one stopped ──wrong digest──► one host alone, from the start
//!                     ▲         │                                          │   ▲              │
//!                     └─────────┘ the spooled data is damaged              │   └──next host──┘ wrong, or broken
//!                                                                          └──none left──► error of all hosts
//! ```
//! A host that sent a complete blob with a wrong digest gets no further request. If several hosts sent parts, the
//! wrong part is unknown, so the complete blob is requested from each host alone.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::CONTENT_RANGE;
use reqwest::{Response, StatusCode, Url};
use tokio::time::{Instant, timeout};

use super::endpoint::Request;
use super::{Registry, RegistryError, foreign, retry};
use crate::digest::{Digest, Hasher};
use crate::manifest::Descriptor;

/// Maximum consecutive failures without progress.
const FAILURES_MAX: u32 = 5;
/// Bytes that count as progress.
const PROGRESS: u64 = 64 << 10;

/// Maximum fetches from the start because spooled data seems to be damaged. After that the host counts as the cause.
const DAMAGED_SPOOLS_MAX: u32 = 2;

/// Maximum bytes of an unusable blob that are read only to check its digest. The sender states the length.
const CHECKED_REST_MAX: u64 = 8 << 30;

/// A host that may have a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Host {
    /// An endpoint of the registry, by its index.
    Own(usize),
    /// A URL in the manifest, by its index.
    Foreign(usize),
}

/// A blob that is being read.
pub(crate) struct Blob<'a> {
    registry: &'a Registry,
    digest: Digest,
    size: u64,
    offset: u64,
    hasher: Hasher,
    /// The blob is complete and its digest is right.
    verified: bool,
    /// The current transfer, and the number of its first bytes to skip.
    response: Option<(Response, u64)>,
    /// The hosts of the requests, and the index of the current host.
    hosts: Vec<Host>,
    at: usize,
    foreign: Vec<Url>,
    /// The hosts that sent the data so far.
    senders: BTreeSet<Host>,
    /// Some data comes from a spool.
    has_spooled_data: bool,
    /// Fetches from the start because spooled data seemed to be damaged.
    damaged_spools: u32,
    /// Hosts of the next requests, each for the complete blob, because the data from several hosts was wrong.
    remaining: Option<VecDeque<Host>>,
    /// Errors of earlier hosts.
    refused: Vec<RegistryError>,
    /// The host returned a wrong range, so the whole blob is requested.
    whole: bool,
    failures: Vec<RegistryError>,
    /// Offset of the last failure.
    mark: u64,
    /// Offset of the last progress, and the waiting time since.
    reached: u64,
    waited: Duration,
}

// === impl Blob ===

impl<'a> Blob<'a> {
    pub(super) fn new(registry: &'a Registry, descriptor: &Descriptor) -> Blob<'a> {
        let foreign = foreign::usable_urls(&descriptor.urls);
        let own = registry.pull_hosts().into_iter().map(Host::Own);
        let hosts = own.chain((0..foreign.len()).map(Host::Foreign)).collect();
        Blob {
            registry,
            digest: descriptor.digest,
            size: descriptor.size,
            offset: 0,
            hasher: Hasher::new(descriptor.digest.algorithm()),
            verified: false,
            response: None,
            hosts,
            at: 0,
            foreign,
            senders: BTreeSet::new(),
            has_spooled_data: false,
            damaged_spools: 0,
            remaining: None,
            refused: Vec::new(),
            whole: false,
            failures: Vec::new(),
            mark: 0,
            reached: 0,
            waited: Duration::ZERO,
        }
    }

    /// The next piece. `None` at the end, after the digest was verified.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        loop {
            if self.offset == self.size {
                return self.verify().map(|()| None);
            }
            let timeout_after = self.registry.timeouts.progress;
            // The time that the caller needs for a piece does not count.
            let began = Instant::now();
            let piece = timeout(timeout_after.saturating_sub(self.waited), self.piece()).await;
            self.waited += began.elapsed();
            match piece.unwrap_or_else(|_late| {
                Err(RegistryError::NoProgress { url: self.url(), timeout: timeout_after })
            }) {
                Ok(piece) if piece.is_empty() => {}
                Ok(piece) => {
                    self.senders.extend(self.hosts.get(self.at));
                    self.hasher.update(&piece);
                    self.offset += piece.len() as u64;
                    if self.offset >= self.reached + PROGRESS {
                        (self.reached, self.waited) = (self.offset, Duration::ZERO);
                    }
                    return Ok(Some(piece));
                }
                Err(error) => self.failed(error).await?,
            }
        }
    }

    /// Takes data of a spool, before anything is requested.
    pub(crate) fn resume_with(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
        self.offset += piece.len() as u64;
        (self.mark, self.reached) = (self.offset, self.offset);
        self.has_spooled_data = true;
    }

    /// The current offset, if it is at least [`PROGRESS`] bytes after `offset`.
    pub(crate) fn progress_since(&self, offset: u64) -> Option<u64> {
        (self.offset >= offset + PROGRESS).then_some(self.offset)
    }

    /// Returns an error if `idle` reaches the time limit for progress. `idle` can include several attempts.
    pub(crate) fn check_idle(&self, idle: Duration) -> Result<(), RegistryError> {
        let timeout = self.registry.timeouts.progress;
        if idle < timeout { Ok(()) } else { Err(RegistryError::NoProgress { url: self.url(), timeout }) }
    }

    /// Reads a small blob completely.
    pub(crate) async fn read_all(mut self) -> Result<Vec<u8>, RegistryError> {
        loop {
            match self.rest().await {
                Ok(whole) => return Ok(whole),
                Err(error) => self.start_again(error)?,
            }
        }
    }

    /// Determines why the content cannot be unpacked. Returns an error if spooled data or the host is at fault. If
    /// another host could have better content, reads the rest of the blob to check its digest.
    pub(crate) async fn check_rest(&mut self, why: io::Error) -> Result<(), RegistryError> {
        if self.has_spooled_data {
            return Err(self.damaged(why));
        }
        let others = self.hosts.len() > 1 || self.remaining.is_some();
        if others && self.size - self.offset <= CHECKED_REST_MAX {
            while self.next().await?.is_some() {}
        }
        Ok(())
    }

    /// The error of damaged spooled data.
    pub(crate) fn damaged(&self, source: io::Error) -> RegistryError {
        RegistryError::DamagedSpool { digest: self.digest.into(), source }
    }

    /// Starts again from the beginning, at a host that may have better content. If no such host is left, returns the
    /// error with the errors of the other hosts.
    pub(crate) fn start_again(&mut self, error: RegistryError) -> Result<(), RegistryError> {
        let wrong = matches!(error, RegistryError::Digest { .. });
        let is_of_spool =
            matches!(error, RegistryError::DamagedSpool { .. }) || (self.has_spooled_data && wrong);
        if is_of_spool && self.damaged_spools < DAMAGED_SPOOLS_MAX {
            self.damaged_spools += 1;
            tracing::info!(digest = %self.digest, "spooled data of a layer is damaged: fetching it again");
            self.reset();
            return Ok(());
        }
        if self.remaining.is_none() && !wrong {
            return Err(error);
        }
        let senders = std::mem::take(&mut self.senders);
        let may_have_better_content = |host: &Host| senders.len() > 1 || !senders.contains(host);
        let remaining = self
            .remaining
            .get_or_insert_with(|| self.hosts.iter().copied().filter(may_have_better_content).collect());
        self.refused.push(error);
        let Some(next) = remaining.pop_front() else {
            return Err(self.registry.joined(std::mem::take(&mut self.refused)));
        };
        (self.hosts, self.at) = (vec![next], 0);
        self.reset();
        Ok(())
    }

    /// Prepares another attempt from the start, at the same hosts.
    pub(crate) fn reset(&mut self) {
        self.hasher = Hasher::new(self.digest.algorithm());
        self.senders.clear();
        self.failures.clear();
        (self.response, self.whole) = (None, false);
        (self.has_spooled_data, self.verified) = (false, false);
        (self.offset, self.mark, self.reached, self.waited) = (0, 0, 0, Duration::ZERO);
    }

    async fn rest(&mut self) -> Result<Vec<u8>, RegistryError> {
        let mut whole = Vec::new();
        while let Some(piece) = self.next().await? {
            whole.extend_from_slice(&piece);
        }
        Ok(whole)
    }

    async fn piece(&mut self) -> Result<Bytes, RegistryError> {
        let (mut response, skip) = match self.response.take() {
            Some(open) => open,
            None => self.open().await?,
        };
        let url = || self.url();
        let Some(mut piece) = response.chunk().await.map_err(|e| RegistryError::transfer(url(), e))? else {
            return Err(RegistryError::Short { url: url(), got: self.offset, size: self.size });
        };
        let known = skip.min(piece.len() as u64);
        let new = piece.split_off(usize::try_from(known).unwrap_or(piece.len()));
        if self.offset + new.len() as u64 > self.size {
            return Err(RegistryError::TooLarge { url: url(), max: self.size });
        }
        self.response = Some((response, skip - known));
        Ok(new)
    }

    /// Requests the missing part. If a host does not support ranges, the known bytes are skipped. If a host returns a
    /// wrong range or refuses the range, the next request is for the whole blob.
    async fn open(&mut self) -> Result<(Response, u64), RegistryError> {
        let from = if self.whole { 0 } else { self.offset };
        let no_part = || RegistryError::Short { url: self.url(), got: self.offset, size: self.size };
        let response = match self.request(from).await {
            Err(RegistryError::Status { status: StatusCode::RANGE_NOT_SATISFIABLE, .. }) if from > 0 => {
                let error = no_part();
                self.whole = true;
                return Err(error);
            }
            response => response?,
        };
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // Different content, such as a login page of a captive portal, is not used at all.
            return match response.content_length() {
                Some(length) if length != self.size => {
                    Err(RegistryError::Length { url: self.url(), length, size: self.size })
                }
                _ => Ok((response, self.offset)),
            };
        }
        let range = response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
        match range.and_then(range_start) {
            Some(start) if start <= self.offset => Ok((response, self.offset - start)),
            _ => {
                let error = no_part();
                self.whole = true;
                Err(error)
            }
        }
    }

    async fn request(&self, from: u64) -> Result<Response, RegistryError> {
        let registry = self.registry;
        let none = || RegistryError::NoHost { domain: registry.domain.clone() };
        match *self.hosts.get(self.at).ok_or_else(none)? {
            Host::Own(index) => {
                let endpoint = registry.endpoints.get(index).ok_or_else(none)?;
                let path = registry.path(index, &format!("blobs/{}", self.digest));
                endpoint.request(&Request { path: &path, accept: "*/*", from, head: false }).await
            }
            Host::Foreign(index) => {
                let url = self.foreign.get(index).ok_or_else(none)?;
                foreign::request(url, from, registry.timeouts).await
            }
        }
    }

    /// Counts a failure and waits before the next attempt, or returns all errors.
    async fn failed(&mut self, error: RegistryError) -> Result<(), RegistryError> {
        if self.offset >= self.mark + PROGRESS {
            self.failures.clear();
        }
        self.mark = self.offset;
        let hosts = self.hosts.len().max(1);
        let count = u32::try_from(self.failures.len()).unwrap_or(u32::MAX).saturating_add(1);
        let stalled = matches!(error, RegistryError::Stalled { .. })
            // A host that was reachable before may soon be reachable again.
            || (self.offset > 0 && matches!(error, RegistryError::Connect { .. }));
        let delay = retry::delay(&error, count).or(stalled.then(|| retry::backoff(count)));
        let other_host = self.at + 1 < hosts;
        if matches!(error, RegistryError::NoProgress { .. }) {
            // The next host, if there is one, gets the full timeout.
            self.waited = Duration::ZERO;
        }
        self.failures.push(error);
        // The first host may fail twice before the other hosts are tried.
        let max_failures = FAILURES_MAX.max(u32::try_from(hosts).unwrap_or(u32::MAX).saturating_add(1));
        if count >= max_failures || !(delay.is_some() || other_host) {
            let mut failures = std::mem::take(&mut self.failures);
            if self.remaining.is_some() {
                // Only the last error is returned here. `refused` has the errors of the other hosts.
                failures.drain(..failures.len() - 1);
            }
            return Err(self.registry.joined(failures));
        }
        if delay.is_none() || count >= 2 {
            let next = (self.at + 1) % hosts;
            self.whole &= next == self.at;
            self.at = next;
        }
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
            self.waited += delay;
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<(), RegistryError> {
        if self.verified {
            return Ok(());
        }
        let hasher = std::mem::replace(&mut self.hasher, Hasher::new(self.digest.algorithm()));
        let actual = hasher.finish();
        self.verified = actual == self.digest;
        if self.verified {
            return Ok(());
        }
        let urls: Vec<String> = self.senders.iter().map(|host| self.url_at(*host)).collect();
        let url = if urls.is_empty() { self.url() } else { urls.join(" and ") };
        Err(RegistryError::Digest { url, expected: self.digest.into(), actual: actual.into() })
    }

    fn url(&self) -> String {
        self.hosts.get(self.at).map_or_else(String::new, |host| self.url_at(*host))
    }

    fn url_at(&self, host: Host) -> String {
        match host {
            Host::Own(index) => {
                let base = self.registry.endpoints.get(index).map_or("", |e| e.host.base.as_str());
                format!("{base}{}", self.registry.path(index, &format!("blobs/{}", self.digest)))
            }
            Host::Foreign(index) => self.foreign.get(index).map(Url::to_string).unwrap_or_default(),
        }
    }
}

/// The first byte of a range such as `bytes 100-199/200`.
fn range_start(value: &str) -> Option<u64> {
    value.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::range_start;

    #[test]
    fn ranges_are_read() {
        assert_eq!(range_start("bytes 100-199/200"), Some(100));
        assert_eq!(range_start("bytes */200"), None);
        assert_eq!(range_start("items 1-2/3"), None);
    }
}
