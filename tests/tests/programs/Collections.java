/** Lists, maps and strings that outlive several collections of garbage. */
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

public class Collections {
    public static void main(String[] arguments) {
        int count = Integer.parseInt(arguments[0]);
        Map<Integer, String> names = new HashMap<>();
        List<long[]> blocks = new ArrayList<>();
        long sum = 0;
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < count; i++) {
                names.put(i * 31 % count, "name " + i * 7919L % 1000003 + " of round " + round);
                if (i % 16 == 0) {
                    long[] block = new long[512];
                    block[i % 512] = i + round;
                    if (round == 0) blocks.add(block); else blocks.set(i / 16, block);
                }
            }
            for (String name : names.values()) sum = sum * 31 + name.hashCode();
            for (long[] block : blocks) for (long value : block) sum += value;
        }
        System.out.println(names.size() + " " + blocks.size() + " " + sum);
    }
}
