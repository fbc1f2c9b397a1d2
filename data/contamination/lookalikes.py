"""Letters and digits of other scripts that look like ASCII ones.

From Unicode Technical Standard #39 (confusables.txt of Unicode 14.0, © Unicode, Inc., https://www.unicode.org/license.txt): single letters
and numbers whose prototype, ignoring marks, is one ASCII letter or digit. Excluded are characters folded by normalization (compatibility
forms, digits of other scripts), right-to-left scripts, and Chinese and Japanese characters.
"""

PROTOTYPES = {
    "2": "ƧƻϨᒿꙄꛯꝚ",
    "3": "ƷȜЗҘӠⳌꝪꞫ𑣊𖼻",
    "4": "Ꮞ𑢯",
    "5": "Ƽ𑢻",
    "6": "бᏮⳒ𑣕",
    "7": "𐓒𑣆",
    "8": "Ȣȣ𐌚",
    "9": "ⳊꝮ𑢬𑣌𑣖",
    "A": "ΑАᎪᗅꓮ𐊠𖽀",
    "B": "ΒВᏴᗷꓐꞴ𐊂𐊡𐌁",
    "C": "СҪᏟⲤꓚ𐊢𐌂𐐕𐔜𑣲",
    "D": "ÐĐƉᎠᗞᗪꓓ",
    "E": "ɆΕЕᎬⴹꓰ𐊆𑢦𑢮",
    "F": "ƑϜᖴꓝꞘ𐊇𐊥𐔥𑢢𑣂",
    "G": "ǤԌᏀᏳꓖ",
    "H": "ĦΗНҢӇӉᎻᕼⱧⲎꓧ𐋏",
    "J": "ɈͿЈᎫᒍꓙꞲ",
    "K": "ΚКҚҞᏦᛕⱩⲔꓗꝀ𐔘",
    "L": "ŁᏞᒪⳐꓡ𐐛𐔦𑢣𑢲𖼖",
    "M": "ΜϺМӍᎷᗰᛖⲘꓟ𐊰𐌑",
    "N": "ƝΝⲚꓠ𐔓",
    "O": "ØƟΘΟθОѲӨՕଠዐᎾᏫⲞⴱⵁⵔꓳꝊ𐊒𐊫𐐄𐓂𐔖𑢵",
    "P": "ΡРᏢᑭⲢꓑ𐊕",
    "Q": "ⵕ",
    "R": "ƦᎡᏒᖇꓣ𐒴𖼵",
    "S": "ЅՏᏕᏚꓢ𐊖𐐠𖼺",
    "T": "ŦƮȾΤТҬᎢⲦꓔ𐊗𐊱𐌕𑢼𖼊",
    "U": "ɄՍሀᏌᑌꓴ𐓎𑢸𖽂",
    "V": "ѴᏙᐯⴸꓦꛟ𐔝𑢠𖼈",
    "W": "ԜᎳᏔꓪ𑣯",
    "X": "ΧХҲᚷⲬⵝꓫꞳ𐊐𐊴𐌗𐌢𐔧𑣬",
    "Y": "ɎΥУҮҰᎩᎽⲨꓬ𐊲𑢤𖽃",
    "Z": "ƵȤΖᏃꓜ𐋵𑢩",
    "a": "ɑαа",
    "b": "ƀƂƃƄɓБЬѢѣҌҍᏏᑲᑳᖯ",
    "c": "ȼсҫᴄⲥꮯ𐐽",
    "d": "đƌɖɗԁᏧᑯꓒ",
    "e": "ɇеҽҿꬲ",
    "f": "ƒքᵮẝꞙꬵ",
    "g": "ƍǥɠɡցᶃ",
    "h": "ħɦћһհᏂᏲꚕ",
    "i": "ıɨɩɪιіӏᎥᵻᵼꙇꭵ𑣃",
    "j": "ɉϳј",
    "k": "ƙ",
    "l": "łƖƗƚǀɫɭΙІӀᛁⲒⵏꓲ𐊊𐌉𐌠𖼨",
    "n": "ƞɳηոռᵰ",
    "o": "øɵοσоѳөօഠဝჿᴏᴑⲟꝋꬽꬾꭴꮎꮻ𐐬𐓪𑣈𑣗",
    "p": "ƥρрᵽⲣ",
    "q": "ʠԛգզ",
    "r": "ɍɼɽгғᴦᵲⲅꭇꭈꮁ",
    "s": "ƽʂѕᵴꜱꮪ𐑈𑣁",
    "t": "ŧƭᵵ",
    "u": "ʋυսᴜᵾꞟꭎꭒꮜ𐓶𑣘",
    "v": "νѵᴠꮩ𑜆𑣀",
    "w": "ɯѡԝաᴡꝡꮃ𑓅𑜊𑜎𑜏",
    "x": "хᕁᕽ",
    "y": "ƴɏɣʏγуүұყᶌỿꭚ𑣜",
    "z": "ƶȥʐᴢᵶꮓ𑣄",
}
"""ASCII character → its lookalikes."""

SMALL_CAPITALS = dict(zip("ᴀʙᴅᴇꜰɢʜᴊᴋʟᴍɴᴘʀᴛʏ", "abdefghjklmnprty", strict=True))
"""Small capitals, which are separate prototypes in the table."""


def _lookalikes() -> dict[str, str]:
    found = {char: target for target, chars in PROTOTYPES.items() for char in chars} | SMALL_CAPITALS
    for char, target in tuple(found.items()):
        if target == "l" and char.isupper():
            found[char] = target = "I"  # the table has one prototype for I, l and 1
        if target.isupper() and len(char.lower()) == 1:  # lowercase letters that look like their capitals, e.g. in Cyrillic
            found.setdefault(char.lower(), target)
    return found


LOOKALIKES = _lookalikes()
"""Lookalike → ASCII letter (of either case) or digit."""
