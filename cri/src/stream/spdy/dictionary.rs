//! The preset dictionary of SPDY/3's header compression (draft-mbelshe-httpbis-spdy-00, 2.6.10.1): 1,423 bytes, first words
//! with length prefixes, then plain text.

const WORDS: &str = "options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|accept-language|\
     accept-ranges|age|allow|authorization|cache-control|connection|content-base|content-encoding|\
     content-language|content-length|content-location|content-md5|content-range|content-type|date|\
     etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|\
     if-unmodified-since|last-modified|location|max-forwards|pragma|proxy-authenticate|\
     proxy-authorization|range|referer|retry-after|server|te|trailer|transfer-encoding|upgrade|\
     user-agent|vary|via|warning|www-authenticate|method|get|status|200 OK|version|HTTP/1.1|url|\
     public|set-cookie|keep-alive|origin";
const TAIL: &str = "10010120120220520630030230330430530630740240540640740840941041141241341441541641750250450520\
     3 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unautho\
     rized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unava\
     ilableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat\
     , Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+\
     xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=is\
     o-8859-1,utf-,*,enq=0.";

/// The dictionary's bytes.
pub(super) fn dictionary() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1423);
    for word in WORDS.split('|') {
        bytes.extend_from_slice(&u32::try_from(word.len()).unwrap_or_default().to_be_bytes());
        bytes.extend_from_slice(word.as_bytes());
    }
    bytes.extend_from_slice(TAIL.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_dictionary_is_the_published_dictionary() {
        assert_eq!(dictionary().len(), 1423);
        assert_eq!(
            hex::encode(Sha256::digest(dictionary())),
            "51d27341373f923f3cd88e1eb7162aeaa3723d7585ff2399201dc06498407f02"
        );
    }
}
