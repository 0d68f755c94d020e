//! Which image a document leads to, on this machine: what is to be read next, and what follows from it. Pure.
//!
//! An index mostly says for whom its manifests are, and is believed. Of those of which it does not say it, their own
//! configurations do; then several are looked at, and what is no image at all (a signature, say) is passed over.

use super::platform::{self, Chosen, Fitting, choose};
use super::{Descriptor, Document, Manifest, ManifestError, config_platform, parse};
use crate::config::Platform;

/// How deep indexes may lie in each other.
const NESTING_MAX: usize = 3;
/// Most documents that are looked at because an index does not say for whom they are.
pub(super) const UNMARKED_MAX: usize = 16;

/// A search, from a document on.
pub(crate) struct Search<'a> {
    wanted: &'a Platform,
    /// To be read, the last one first.
    leads: Vec<Lead>,
    /// To be judged by its configuration.
    candidate: Option<Candidate>,
    /// The only one, by what its name or its index says.
    found: Option<Found>,
    /// Some index did not say for whom its manifests are.
    unsure: bool,
    looked_at: usize,
    /// The best so far, smaller ranks being better.
    best: Option<(usize, Found)>,
    /// What there is for others.
    available: Vec<String>,
    refused: Option<ManifestError>,
}

/// What is to be read next.
pub(crate) enum Step {
    /// A manifest or an index.
    Document(Lead),
    /// The configuration of what may be it.
    Configuration(Candidate),
    /// Nothing: this is it.
    Found(Found),
}

/// A document that may lead to the image.
pub(crate) struct Lead {
    pub(crate) descriptor: Descriptor,
    depth: usize,
    chosen: Chosen,
}

/// An image that may be it.
pub(crate) struct Candidate {
    pub(crate) manifest: Manifest,
    chosen: Chosen,
}

/// The image, how it was come by, and its configuration where that was read.
pub(crate) struct Found {
    pub(crate) manifest: Manifest,
    pub(crate) chosen: Chosen,
    pub(crate) config: Option<Vec<u8>>,
}

// === impl Search ===

impl<'a> Search<'a> {
    /// Begins with the document that a name means.
    pub(crate) fn new(top: &[u8], wanted: &'a Platform) -> Result<Search<'a>, ManifestError> {
        let mut search = Search {
            wanted,
            leads: Vec::new(),
            candidate: None,
            found: None,
            unsure: false,
            looked_at: 0,
            best: None,
            available: Vec::new(),
            refused: None,
        };
        search.follow(parse(top)?, Chosen::Alone, 0)?;
        Ok(search)
    }

    /// What to read, or what was found.
    pub(crate) fn next(&mut self) -> Result<Step, ManifestError> {
        if let Some(found) = self.found.take() {
            return Ok(Step::Found(found));
        }
        if let Some(candidate) = self.candidate.take() {
            return Ok(Step::Configuration(candidate));
        }
        if let Some(lead) = self.leads.pop().filter(|_| self.looked_at < UNMARKED_MAX) {
            self.looked_at += usize::from(self.unsure);
            return Ok(Step::Document(lead));
        }
        match self.best.take() {
            Some((_, found)) => Ok(Step::Found(found)),
            None => Err(self.none()),
        }
    }

    /// Whether there may be another one than the document that is read: it may be absent.
    pub(crate) fn is_unsure(&self) -> bool {
        self.unsure
    }

    /// Takes in what a lead led to.
    pub(crate) fn document(&mut self, lead: &Lead, bytes: &[u8]) -> Result<(), ManifestError> {
        let followed = parse(bytes).and_then(|document| self.follow(document, lead.chosen, lead.depth));
        if self.unsure { self.pass_over(followed) } else { followed }
    }

    /// Takes in the configuration of a candidate.
    pub(crate) fn configuration(
        &mut self,
        candidate: Candidate,
        bytes: Vec<u8>,
    ) -> Result<(), ManifestError> {
        let given = match config_platform(&bytes) {
            Ok(given) => given,
            Err(error) => return self.pass_over(Err(error)),
        };
        let rank = platform::config_rank(self.wanted, &given);
        // An index of its own may have marked it.
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
            self.leads.clear();
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
        let lead = |descriptor: &Descriptor, chosen| Lead {
            descriptor: descriptor.clone(),
            depth: depth + 1,
            chosen,
        };
        match choose(&manifests, self.wanted)? {
            Fitting::Marked(descriptor) => self.leads.push(lead(descriptor, Chosen::ByPlatform)),
            Fitting::Unmarked(all) => {
                self.unsure = true;
                self.leads.extend(all.into_iter().rev().map(|descriptor| lead(descriptor, Chosen::Unmarked)));
            }
        }
        Ok(())
    }

    /// One of several is nothing for us. Remembers why, should the others be neither.
    fn pass_over(&mut self, followed: Result<(), ManifestError>) -> Result<(), ManifestError> {
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
