//! One blob, in pieces: taken up again where it broke off, from the next host if need be, and verified at its end.
//!
//! ```text
//! all hosts, each from where the one before broke off ──wrong digest──► one host alone, from the beginning
//!                     ▲         │                                          │   ▲              │
//!                     └─────────┘ what an earlier try kept is damaged      │   └──next host──┘ wrong, or broken
//!                                                                          └──none left──► all that was said
//! ```
//! Who sent all of a blob that is not what its digest says is not asked for it again. When several sent parts of it,
//! nobody knows whose are wrong: then each is asked alone.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::CONTENT_RANGE;
use reqwest::{Response, StatusCode, Url};
use tokio::time::{Instant, timeout};

use super::endpoint::Ask;
use super::{Registry, RegistryError, foreign, retry};
use crate::digest::{Digest, Hasher};
use crate::manifest::Descriptor;

/// Failures in a row, without progress between, after which a blob is given up.
const FAILURES_MAX: u32 = 5;
/// What counts as progress.
const PROGRESS: u64 = 64 << 10;

/// How much of a blob that cannot be used is read for its digest alone: who sends it also says how long it is.
const DOUBTED_MAX: u64 = 8 << 30;

/// Who may have a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Host {
    /// One of the registry's, by its place in the list.
    Own(usize),
    /// One that the manifest names.
    Foreign(usize),
}

/// A blob that is being read.
pub(crate) struct Blob<'a> {
    registry: &'a Registry,
    digest: Digest,
    size: u64,
    offset: u64,
    hasher: Hasher,
    /// All is here, and is what the digest says.
    verified: bool,
    /// The transfer under way, and bytes at its head that we have already.
    response: Option<(Response, u64)>,
    /// The hosts that may be asked, and which of them is.
    hosts: Vec<Host>,
    at: usize,
    foreign: Vec<Url>,
    /// Who sent what we have.
    givers: BTreeSet<Host>,
    /// An earlier try kept some of it.
    kept: bool,
    /// Those to be asked next, each alone: what came from all together was wrong.
    left: Option<VecDeque<Host>>,
    /// What came of those before.
    refused: Vec<RegistryError>,
    /// The host gave no part of the blob that begins where it was to: it is asked for the whole.
    whole: bool,
    failures: Vec<RegistryError>,
    /// Where the last failure was.
    mark: u64,
    /// Where the last progress was, and how long we waited since.
    reached: u64,
    waited: Duration,
}

// === impl Blob ===

impl<'a> Blob<'a> {
    pub(super) fn new(registry: &'a Registry, descriptor: &Descriptor) -> Blob<'a> {
        let foreign = foreign::places(&descriptor.urls);
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
            givers: BTreeSet::new(),
            kept: false,
            left: None,
            refused: Vec::new(),
            whole: false,
            failures: Vec::new(),
            mark: 0,
            reached: 0,
            waited: Duration::ZERO,
        }
    }

    /// The next piece; none at the end, when all pieces together were found to be what the digest says.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        loop {
            if self.offset == self.size {
                return self.verify().map(|()| None);
            }
            let within = self.registry.patience.progress;
            // The time that the caller takes with a piece is not the registry's.
            let began = Instant::now();
            let piece = timeout(within.saturating_sub(self.waited), self.piece()).await;
            self.waited += began.elapsed();
            match piece.unwrap_or_else(|_late| Err(RegistryError::NoProgress { url: self.url(), within })) {
                Ok(piece) if piece.is_empty() => {}
                Ok(piece) => {
                    self.givers.extend(self.hosts.get(self.at));
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

    /// Takes in what came in an earlier try, before anything is asked for.
    pub(crate) fn known(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
        self.offset += piece.len() as u64;
        (self.mark, self.reached) = (self.offset, self.offset);
        self.kept = true;
    }

    /// The whole of a small blob.
    pub(crate) async fn whole(mut self) -> Result<Vec<u8>, RegistryError> {
        loop {
            match self.rest().await {
                Ok(whole) => return Ok(whole),
                Err(error) => self.begin_again(error)?,
            }
        }
    }

    /// For whoever cannot use what came: an error if that is the fault of those who sent it. Where another host could
    /// have what this one has not, the rest is read, for the digest to tell.
    pub(crate) async fn doubted(&mut self, why: io::Error) -> Result<(), RegistryError> {
        if self.kept {
            return Err(self.damaged(why));
        }
        let others = self.hosts.len() > 1 || self.left.is_some();
        if others && self.size - self.offset <= DOUBTED_MAX {
            while self.next().await?.is_some() {}
        }
        Ok(())
    }

    /// Of what an earlier try kept.
    pub(crate) fn damaged(&self, source: io::Error) -> RegistryError {
        RegistryError::Kept { digest: self.digest.into(), source }
    }

    /// Forgets what came, to be read from the beginning again, from a host that may have what those before had not.
    /// Gives the error back, with what the others said, where there is no such host.
    pub(crate) fn begin_again(&mut self, error: RegistryError) -> Result<(), RegistryError> {
        let wrong = matches!(error, RegistryError::Digest { .. });
        if matches!(error, RegistryError::Kept { .. }) || (self.kept && wrong) {
            tracing::info!(digest = %self.digest, "what was kept of a layer is damaged: getting it anew");
            self.forget();
            return Ok(());
        }
        if self.left.is_none() && !wrong {
            return Err(error);
        }
        let givers = std::mem::take(&mut self.givers);
        let alone = |host: &Host| givers.len() > 1 || !givers.contains(host);
        let left = self.left.get_or_insert_with(|| self.hosts.iter().copied().filter(alone).collect());
        self.refused.push(error);
        let Some(next) = left.pop_front() else {
            return Err(self.registry.joined(std::mem::take(&mut self.refused)));
        };
        (self.hosts, self.at) = (vec![next], 0);
        self.forget();
        Ok(())
    }

    fn forget(&mut self) {
        self.hasher = Hasher::new(self.digest.algorithm());
        self.givers.clear();
        self.failures.clear();
        (self.response, self.whole) = (None, false);
        (self.kept, self.verified) = (false, false);
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

    /// Asks for what is missing. A host that does not know ranges sends all again, and we leave out what we have; one
    /// that answers with another part than that, or says that there is none, is asked for all of it the next time.
    async fn open(&mut self) -> Result<(Response, u64), RegistryError> {
        let from = if self.whole { 0 } else { self.offset };
        let no_part = || RegistryError::Short { url: self.url(), got: self.offset, size: self.size };
        let response = match self.ask(from).await {
            Err(RegistryError::Status { status: StatusCode::RANGE_NOT_SATISFIABLE, .. }) if from > 0 => {
                let error = no_part();
                self.whole = true;
                return Err(error);
            }
            response => response?,
        };
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // Something else altogether, as the page of a portal: not a byte of it is taken.
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

    async fn ask(&self, from: u64) -> Result<Response, RegistryError> {
        let registry = self.registry;
        let none = || RegistryError::NoHost { domain: registry.domain.clone() };
        match *self.hosts.get(self.at).ok_or_else(none)? {
            Host::Own(index) => {
                let endpoint = registry.endpoints.get(index).ok_or_else(none)?;
                let path = registry.path(index, &format!("blobs/{}", self.digest));
                endpoint.ask(&Ask { path: &path, accept: "*/*", from, head: false }).await
            }
            Host::Foreign(index) => {
                let url = self.foreign.get(index).ok_or_else(none)?;
                foreign::ask(url, from, registry.patience).await
            }
        }
    }

    /// Counts a failure and waits before the next try, or gives up with all that was said.
    async fn failed(&mut self, error: RegistryError) -> Result<(), RegistryError> {
        if self.offset >= self.mark + PROGRESS {
            self.failures.clear();
        }
        self.mark = self.offset;
        let hosts = self.hosts.len().max(1);
        let count = u32::try_from(self.failures.len()).unwrap_or(u32::MAX).saturating_add(1);
        let stalled = matches!(error, RegistryError::Stalled { .. })
            // A host that was there a moment ago may be back in another.
            || (self.offset > 0 && matches!(error, RegistryError::Connect { .. }));
        let pause = retry::pause(&error, count).or(stalled.then(|| retry::growing(count)));
        let other_host = self.at + 1 < hosts;
        if matches!(error, RegistryError::NoProgress { .. }) {
            // Another host, if there is one, has all the time again.
            self.waited = Duration::ZERO;
        }
        self.failures.push(error);
        // The first may fail twice before the others get their turn.
        let most = FAILURES_MAX.max(u32::try_from(hosts).unwrap_or(u32::MAX).saturating_add(1));
        if count >= most || !(pause.is_some() || other_host) {
            let mut failures = std::mem::take(&mut self.failures);
            if self.left.is_some() {
                // What one host said is told with what the others did.
                failures.drain(..failures.len() - 1);
            }
            return Err(self.registry.joined(failures));
        }
        if pause.is_none() || count >= 2 {
            let next = (self.at + 1) % hosts;
            self.whole &= next == self.at;
            self.at = next;
        }
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
            self.waited += pause;
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
        let urls: Vec<String> = self.givers.iter().map(|host| self.url_at(*host)).collect();
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

/// The first byte of `bytes 100-199/200`.
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
