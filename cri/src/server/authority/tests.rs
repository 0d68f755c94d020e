use super::*;

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&len[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    match u8::try_from(text.len()) {
        Ok(short @ ..127) => bytes.push(short),
        _ => {
            let mut rest = text.len() - 127;
            bytes.push(127);
            while rest >= 128 {
                bytes.push(u8::try_from(rest % 128).unwrap() | 0x80);
                rest /= 128;
            }
            bytes.push(u8::try_from(rest).unwrap());
        }
    }
    bytes.extend(text.bytes());
    bytes
}

/// `:method: POST` by index, a table size, then the representation of `:authority`, then `x: %`.
fn block(authority: &[u8]) -> Vec<u8> {
    [&[0x83, 0x3f, 0x01][..], authority, &[0x40], &text("x"), &text("%2Fkept"), &[0x84]].concat()
}

/// The changed bytes. The result must not depend on the size of the pieces.
fn passed(sent: &[u8]) -> Vec<u8> {
    let mut whole = sent.to_vec();
    Frames::new().process(&mut whole);
    for size in 1..40 {
        let mut pieces = sent.to_vec();
        let mut frames = Frames::new();
        pieces.chunks_mut(size).for_each(|piece| frames.process(piece));
        assert_eq!(pieces, whole, "{size}");
    }
    whole
}

fn changed(sent: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(sent);
    assert!(text.contains("%2Frun%2Fx.sock"));
    let at = sent.windows(15).position(|part| part == b"%2Frun%2Fx.sock").unwrap();
    [&sent[..at], b"-2Frun-2Fx.sock", &sent[at + 15..]].concat()
}

const PREFACE_TEXT: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[test]
fn only_authorities_are_changed_in_every_representation() {
    let path = text("%2Frun%2Fx.sock");
    for first in [&[0x41][..], &[0x01], &[0x11]] {
        check(&[first, &path].concat());
    }
    for first in [0x40, 0x00, 0x10] {
        check(&[&[first], &*text(":authority"), &path].concat());
    }
}

/// The Huffman code of a text (RFC 7541, appendix B), for the characters of paths.
fn huffman(text: &str) -> Vec<u8> {
    let mut bits = String::new();
    for byte in text.bytes() {
        bits += match byte {
            b'%' => "010101",
            b'/' => "011000",
            b'-' => "010110",
            b'.' => "010111",
            b'2' => "00010",
            b'3' => "011001",
            b'F' => "1100001",
            b'c' => "00100",
            b'k' => "1110101",
            b'n' => "101010",
            b'o' => "00111",
            b'r' => "101100",
            b's' => "01000",
            b'u' => "101101",
            b'x' => "1111001",
            b'X' => "11111100",
            b'~' => "1111111111101",
            other => panic!("no code for {other}"),
        };
    }
    bits += &"1".repeat(bits.len().next_multiple_of(8) - bits.len());
    let bytes = bits.as_bytes().chunks(8).map(|byte| std::str::from_utf8(byte).unwrap());
    let coded: Vec<u8> = bytes.map(|byte| u8::from_str_radix(byte, 2).unwrap()).collect();
    [&[0x80 | u8::try_from(coded.len()).unwrap()], &*coded].concat()
}

#[test]
fn authorities_with_the_huffman_code_are_changed_in_place() {
    for (sent, expected) in [
        ("%2Frun%2Fx.sock", ".2Frun.2Fx.sock"),
        ("/run/x.sock", "3run3x.sock"),
        ("XX%x%", "XX.x."),
        // The parser does not know codes of more than eight bits.
        ("%~%", ".~%"),
        ("sock", "sock"),
    ] {
        let at =
            |text: &str| [PREFACE_TEXT, &frame(1, 4, &block(&[&[0x41], &*huffman(text)].concat()))].concat();
        assert_eq!(passed(&at(sent)), at(expected), "{sent}");
    }
}

#[test]
fn slashes_of_plain_authorities_are_changed() {
    let at = |path: &str| [PREFACE_TEXT, &frame(1, 4, &block(&[&[0x41], &*text(path)].concat()))].concat();
    assert_eq!(passed(&at("/run/x.sock")), at("-run-x.sock"));
}

fn check(authority: &[u8]) {
    let block = block(authority);
    let headers =
        |flags, payload: &[u8]| [PREFACE_TEXT, &frame(4, 0, b"%%%%%%"), &frame(1, flags, payload)].concat();
    let sent = headers(4, &block);
    assert_eq!(passed(&sent), changed(&sent));
    // A header block with padding and a priority.
    let padded = [&[3, 0, 0, 0, 0, 7][..], &block, b"%%%"].concat();
    let sent = [headers(4 | 8 | 0x20, &padded), frame(0, 1, b"%2F")].concat();
    assert_eq!(passed(&sent), changed(&sent));
    for cut in 1..block.len() {
        let sent = [headers(0, &block[..cut]), frame(9, 4, &block[cut..]), frame(0, 1, b"%")].concat();
        let percent_signs = |stream: &[u8]| stream.iter().filter(|byte| **byte == b'%').count();
        // Only the percent signs of the path are changed; the length of a frame can have the same byte.
        assert_eq!(percent_signs(&passed(&sent)), percent_signs(&sent) - 2, "{cut}");
    }
}

#[test]
fn values_of_other_headers_are_not_changed() {
    for (first, name) in
        [(0x40, "x-authority"), (0x00, ":authoritx"), (0x10, "authority"), (0x40, ":authorit")]
    {
        let other = [&[first], &*text(name), &text("%2Frun")].concat();
        let sent = [PREFACE_TEXT, &frame(1, 4, &block(&other))].concat();
        assert_eq!(passed(&sent), sent, "{name}");
    }
    let long = [&[0x44][..], &text(&"%".repeat(5000))].concat();
    let sent = [PREFACE_TEXT, &frame(1, 4, &block(&long))].concat();
    assert_eq!(passed(&sent), sent);
}

#[test]
fn a_long_authority_is_changed_to_its_end() {
    let path = "%2F".repeat(3000);
    let sent = [PREFACE_TEXT, &frame(1, 4, &[&[0x41][..], &text(&path)].concat())].concat();
    assert!(passed(&sent).ends_with("-2F".repeat(3000).as_bytes()));
}

#[test]
fn invalid_header_blocks_are_passed_on() {
    let mut state = 1_u32;
    for len in 0..600 {
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        };
        let noise: Vec<u8> = (0..len).map(|_| random()).collect();
        let flags = random();
        let sent = [PREFACE_TEXT, &frame(1, flags, &noise), &frame(0, 1, b"%")].concat();
        assert_eq!(passed(&sent).len(), sent.len());
        assert!(passed(&sent).ends_with(b"%"));
        passed(&noise);
    }
}
