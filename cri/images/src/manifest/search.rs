//! Searches the image for this machine: selects the next document to read, and evaluates each document. Pure.
//!
//! Most indexes state the platforms of their manifests and are trusted. If an index does not state the platforms, the
//! configurations of its manifests are read. Then several manifests are examined. Entries that are not images, such as
//! signatures, are skipped.

use super::platform::{self, Chosen, Fitting, choose};
use super::{Descriptor, Document, Manifest, ManifestError, config_platform, parse};
use crate::config::Platform;

/// Maximum nesting depth of indexes.
const NESTING_MAX: usize = 3;
/// Maximum documents that are read because an index does not state platforms.
pub(super) const UNMARKED_MAX: usize = 16;

/// The state of a search.
pub(crate) struct Search<'a> {
    wanted: &'a Platform,
    /// Documents to read. The last element is read first.
    unread: Vec<DocumentToRead>,
    /// A manifest whose configuration is read next.
    candidate: Option<Candidate>,
    /// The result, if the name or an index identifies it.
    found: Option<Found>,
    /// Whether an index does not state the platforms of its manifests.
    unsure: bool,
    documents_read: usize,
    /// The best candidate so far, with its rank; smaller is better.
    best: Option<(usize, Found)>,
    /// Platforms of unsuitable images, for the error.
    available: Vec<String>,
    refused: Option<ManifestError>,
}

/// The next step.
pub(crate) enum Step {
    /// A manifest or an index.
    Document(DocumentToRead),
    /// The configuration of a candidate.
    Configuration(Candidate),
    /// The result. No document is left to read.
    Found(Found),
}

/// A document to read.
pub(crate) struct DocumentToRead {
    pub(crate) descriptor: Descriptor,
    depth: usize,
    chosen: Chosen,
}

/// A manifest that may be the image.
pub(crate) struct Candidate {
    pub(crate) manifest: Manifest,
    chosen: Chosen,
}

/// The result: manifest, how it was selected, and the configuration if it was read.
pub(crate) struct Found {
    pub(crate) manifest: Manifest,
    pub(crate) chosen: Chosen,
    pub(crate) config: Option<Vec<u8>>,
}

// === impl Search ===

impl<'a> Search<'a> {
    /// Starts with the document that the name refers to.
    pub(crate) fn new(top: &[u8], wanted: &'a Platform) -> Result<Search<'a>, ManifestError> {
        let mut search = Search {
            wanted,
            unread: Vec::new(),
            candidate: None,
            found: None,
            unsure: false,
            documents_read: 0,
            best: None,
            available: Vec::new(),
            refused: None,
        };
        search.follow(parse(top)?, Chosen::Direct, 0)?;
        Ok(search)
    }

    /// The document to read next, or the result.
    pub(crate) fn next(&mut self) -> Result<Step, ManifestError> {
        if let Some(found) = self.found.take() {
            return Ok(Step::Found(found));
        }
        if let Some(candidate) = self.candidate.take() {
            return Ok(Step::Configuration(candidate));
        }
        if let Some(wanted) = self.unread.pop().filter(|_| self.documents_read < UNMARKED_MAX) {
            self.documents_read += usize::from(self.unsure);
            return Ok(Step::Document(wanted));
        }
        match self.best.take() {
            Some((_, found)) => Ok(Step::Found(found)),
            None => Err(self.none()),
        }
    }

    /// Whether there are several candidates, so that a missing document is not an error yet.
    pub(crate) fn is_unsure(&self) -> bool {
        self.unsure
    }

    /// Processes a document that was read.
    pub(crate) fn document(&mut self, wanted: &DocumentToRead, bytes: &[u8]) -> Result<(), ManifestError> {
        let followed = parse(bytes).and_then(|document| self.follow(document, wanted.chosen, wanted.depth));
        if self.unsure { self.skip(followed) } else { followed }
    }

    /// Processes the configuration of a candidate.
    pub(crate) fn configuration(
        &mut self,
        candidate: Candidate,
        bytes: Vec<u8>,
    ) -> Result<(), ManifestError> {
        let given = match config_platform(&bytes) {
            Ok(given) => given,
            Err(error) => return self.skip(Err(error)),
        };
        let rank = platform::config_rank(self.wanted, &given);
        // The index that lists the candidate may have marked it for this platform.
        let rank = rank.or((candidate.chosen == Chosen::ByPlatform).then_some(usize::MAX));
        let Some(rank) = rank else {
            self.available.push(platform::field_name(&given));
            return Ok(());
        };
        if self.best.as_ref().is_none_or(|(best, _)| rank < *best) {
            let Candidate { manifest, chosen } = candidate;
            self.best = Some((rank, Found { manifest, chosen, config: Some(bytes) }));
        }
        if rank == 0 {
            self.unread.clear();
        }
        Ok(())
    }

    fn follow(&mut self, document: Document, chosen: Chosen, depth: usize) -> Result<(), ManifestError> {
        let manifests = match document {
            Document::Manifest(manifest) if self.unsure => {
                self.candidate = Some(Candidate { manifest: *manifest, chosen });
                return Ok(());
            }
            Document::Manifest(manifest) => {
                self.found = Some(Found { manifest: *manifest, chosen, config: None });
                return Ok(());
            }
            Document::Index(_) if depth == NESTING_MAX => return Err(ManifestError::Nesting),
            Document::Index(manifests) => manifests,
        };
        let wanted = |descriptor: &Descriptor, chosen| DocumentToRead {
            descriptor: descriptor.clone(),
            depth: depth + 1,
            chosen,
        };
        match choose(&manifests, self.wanted)? {
            Fitting::Marked(descriptor) => self.unread.push(wanted(descriptor, Chosen::ByPlatform)),
            Fitting::Unmarked(all) => {
                self.unsure = true;
                // The search reads at most this number of documents.
                let first = all.into_iter().take(UNMARKED_MAX).rev();
                self.unread.extend(first.map(|descriptor| wanted(descriptor, Chosen::Unmarked)));
            }
        }
        Ok(())
    }

    /// Skips one of several candidates. Keeps the first error, for the case that no other candidate matches.
    fn skip(&mut self, followed: Result<(), ManifestError>) -> Result<(), ManifestError> {
        if let Err(error) = followed {
            self.refused.get_or_insert(error);
        }
        Ok(())
    }

    fn none(&mut self) -> ManifestError {
        let (wanted, available) = (platform::name(self.wanted), self.available.join(", "));
        let refused = self.refused.take().filter(|_| available.is_empty());
        refused.unwrap_or(ManifestError::Platform { wanted, available })
    }
}
